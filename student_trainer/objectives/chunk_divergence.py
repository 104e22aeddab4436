"""The objective of offline distillation from a store with another tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.data.aligned import AlignedBatch, make_aligned_batch
from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.metric_sums import sum_and_count
from student_trainer.data.packing import Layout
from student_trainer.losses import FusedLoss, Index, LossFunction, Rows, chunk_divergence
from student_trainer.objectives.weighted import weighted


@dataclass(frozen=True)
class ChunkObjective:
    """The objective to minimise: `chunk_divergence` + cross_entropy * (-log p of each token).

    In nats. temperature: of the student's distribution. cross_entropy: the weight of that term.
    """

    temperature: float
    cross_entropy: float

    needs_all_rows = True

    def batch(
        self, scored: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> AlignedBatch:
        """Make the tensors of one micro-batch; see `make_aligned_batch`."""
        return make_aligned_batch(scored, device, layout)

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch as a function of rows, times the weight of each sequence."""
        assert isinstance(batch, AlignedBatch)

        def loss(rows: Rows, index: Index) -> Tensor:
            learned = batch.learned[index]
            found = chunk_divergence(
                rows.token_logprobs,
                batch.teacher.token_logprobs[index],
                batch.word[index],
                learned,
            )
            if not self.cross_entropy:
                return found
            return found + self.cross_entropy * _cross_entropy(rows, learned)

        return weighted(loss, batch.sequence_weights)

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric over the tokens or the answers of a batch."""
        assert isinstance(batch, AlignedBatch)
        return {
            "cross_entropy": sum_and_count(-out.rows.token_logprobs[batch.learned]),
            "entropy": sum_and_count(out.metrics["entropy"]),
            "pair/one_to_one": sum_and_count(batch.one_to_one.float()),
            "pair/left_out": sum_and_count(batch.left_out.float()),
        }

    @torch.no_grad()
    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the held-out metrics of each token, [n], by their names in metrics.jsonl."""
        assert isinstance(batch, AlignedBatch)
        values = _cross_entropy(out.rows, batch.learned)
        return {"eval/cross_entropy": values, "eval/perplexity": values}


def _cross_entropy(rows: Rows, learned: Tensor) -> Tensor:
    """Return -log p of each token, [N]; 0 where it is not learned."""
    none = torch.zeros_like(rows.token_logprobs)
    return torch.where(learned, -rows.token_logprobs, none)
