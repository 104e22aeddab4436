"""The objective of supervised fine-tuning: the cross-entropy of stored tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.data.batch import Batch, ScoredSequence, make_batch, sum_and_count
from student_trainer.data.packing import Layout
from student_trainer.losses import FusedLoss, Index, LossFunction, Rows, weight_loss


@dataclass(frozen=True)
class CrossEntropyObjective:
    """Minimises the cross-entropy -log p of each learned token, in nats."""

    temperature = 1.0
    needs_all_rows = False

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> Batch:
        """Make the tensors of one micro-batch; see `make_batch`."""
        return make_batch(scored_sequences, device, layout)

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch: a function of rows, multiplied by the sequence weights."""
        return weight_loss(_cross_entropy, batch.sequence_weights)

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric over the tokens of a batch, all with weight 1."""
        return {
            "cross_entropy": sum_and_count(-out.rows.token_logprobs),
            "entropy": sum_and_count(out.metrics["entropy"]),
        }

    @torch.no_grad()
    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the held-out metrics: the name in metrics.jsonl and one value per token, [n]."""
        values = -out.rows.token_logprobs
        return {"eval/cross_entropy": values, "eval/perplexity": values}

    @torch.no_grad()
    def token_logprobs(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the student's log-prob of each token, [n] in nats, under the key "student"."""
        return {"student": out.rows.token_logprobs}


def _cross_entropy(rows: Rows, index: Index) -> Tensor:
    return -rows.token_logprobs
