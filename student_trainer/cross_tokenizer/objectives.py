"""The objectives of distillation from another tokenizer: for rollouts and for stored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from student_trainer.cross_tokenizer.aligned_rows import AlignedBatch, make_aligned_batch
from student_trainer.cross_tokenizer.losses import (
    Horizon,
    chunk_divergence,
    cross_tokenizer_kl,
    mapped_kl,
)
from student_trainer.data.batch import Batch, ScoredSequence, sum_and_count, sum_and_count_where
from student_trainer.data.packing import Layout
from student_trainer.losses import (
    FusedLoss,
    Index,
    LossFunction,
    Rows,
    importance_weights,
    mismatch,
    weight_loss,
)


@dataclass(frozen=True)
class CrossTokenizerObjective:
    """Minimises log p - log q of words or answers that the student sampled.

    - horizon: whether a token's advantage covers words or the whole answer; see
      `cross_tokenizer_kl`.
    - temperature: temperature of the student's distribution.
    """

    horizon: Horizon
    temperature: float

    needs_all_rows = True

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> AlignedBatch:
        """Make the tensors of one micro-batch; see `make_aligned_batch`."""
        return make_aligned_batch(scored_sequences, device, layout)

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch: a function of rows, multiplied by the sequence weights."""
        assert isinstance(batch, AlignedBatch)
        assert batch.sampling_logprobs is not None, "rollouts have sampling log-probs"
        sampling = batch.sampling_logprobs

        def loss(rows: Rows, index: Index) -> Tensor:
            return cross_tokenizer_kl(
                rows.token_logprobs,
                batch.teacher.token_logprobs[index],
                batch.word[index],
                batch.sequence[index],
                batch.learned[index],
                horizon=self.horizon,
                importance=importance_weights(rows.token_logprobs, sampling[index]),
            )

        return weight_loss(loss, batch.sequence_weights)

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return each metric as (sum, number of values). Values are per token or per answer."""
        assert isinstance(batch, AlignedBatch)
        assert batch.sampling_logprobs is not None, "rollouts have sampling log-probs"
        logprobs = out.rows.token_logprobs
        costs = logprobs - batch.teacher.token_logprobs
        return {
            "kl/teacher": sum_and_count_where(batch.learned, costs),
            **mismatch(logprobs, batch.sampling_logprobs),
            "entropy": sum_and_count(out.metrics["entropy"]),
            "pair/one_to_one": sum_and_count(batch.one_to_one.float()),
            "pair/other_spelling": sum_and_count((~batch.spelled).float()),
            "pair/left_out": sum_and_count(batch.left_out.float()),
        }

    @torch.no_grad()
    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return `eval/kl` of each token, [n]: log p minus the teacher's share, in nats."""
        assert isinstance(batch, AlignedBatch)
        costs = out.rows.token_logprobs - batch.teacher.token_logprobs
        return {"eval/kl": torch.where(batch.learned, costs, torch.zeros_like(costs))}

    def token_logprobs(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return no log-probs, because the tokens of the teacher are not those of the student."""
        return {}


@dataclass(frozen=True)
class StoredAnswersObjective:
    """Minimises a loss of stored answers plus cross_entropy * (-log p of each token), in nats.

    - chunks: True if the loss is `chunk_divergence`, False if it is `mapped_kl`.
    - temperature: temperature of the student's distribution.
    - cross_entropy: the weight of the second term.
    """

    chunks: bool
    temperature: float
    cross_entropy: float

    @property
    def needs_all_rows(self) -> bool:
        """True if the loss of a token depends on the rows of other tokens."""
        return self.chunks

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> AlignedBatch:
        """Make the tensors of one micro-batch; see `make_aligned_batch`."""
        return make_aligned_batch(scored_sequences, device, layout)

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch: a function of rows, multiplied by the sequence weights."""
        assert isinstance(batch, AlignedBatch)

        def loss(rows: Rows, index: Index) -> Tensor:
            losses = self._compute_loss(batch, rows, index)
            if not self.cross_entropy:
                return losses
            return losses + self.cross_entropy * _cross_entropy(rows, batch.learned[index])

        return weight_loss(loss, batch.sequence_weights)

    def _compute_loss(self, batch: AlignedBatch, rows: Rows, index: Index) -> Tensor:
        shares, learned = batch.teacher.token_logprobs[index], batch.learned[index]
        if self.chunks:
            return chunk_divergence(rows.token_logprobs, shares, batch.word[index], learned)
        assert batch.weights is not None, "mapped_rows sets the weights"
        return mapped_kl(rows, shares, batch.weights[index], learned)

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return each metric as (sum, number of values). Values are per token or per answer."""
        assert isinstance(batch, AlignedBatch)
        return {
            "kl/teacher": sum_and_count_where(batch.learned, self._compute_kl(batch, out.rows)),
            "cross_entropy": sum_and_count_where(batch.learned, -out.rows.token_logprobs),
            "entropy": sum_and_count(out.metrics["entropy"]),
            "pair/one_to_one": sum_and_count(batch.one_to_one.float()),
            "pair/left_out": sum_and_count(batch.left_out.float()),
        }

    @torch.no_grad()
    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the held-out metrics: the name in metrics.jsonl and one value per token, [n]."""
        assert isinstance(batch, AlignedBatch)
        return {
            "eval/kl": self._compute_kl(batch, out.rows),
            "eval/perplexity": _cross_entropy(out.rows, batch.learned),
        }

    def token_logprobs(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return no log-probs, because the tokens of the teacher are not those of the student."""
        return {}

    def _compute_kl(self, batch: AlignedBatch, rows: Rows) -> Tensor:
        """Return one value per token, [N] in nats.

        If the teacher wrote the text, the mean of the values is the forward KL.
        """
        shares = batch.teacher.token_logprobs
        if not self.chunks:
            return self._compute_loss(batch, rows, slice(0, len(rows)))
        return torch.where(batch.learned, shares - rows.token_logprobs, torch.zeros_like(shares))


def _cross_entropy(rows: Rows, learned: Tensor) -> Tensor:
    """Return -log p of each token, [N]; 0 for tokens that are not learned."""
    zeros = torch.zeros_like(rows.token_logprobs)
    return torch.where(learned, -rows.token_logprobs, zeros)
