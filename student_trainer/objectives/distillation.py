"""The objective of distillation: the KL to a teacher, as a loss of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clients.config.on_policy import OnPolicyConfig
from student_trainer.data.batch import (
    Batch,
    ScoredSequence,
    copy_to_device,
    make_batch,
    sum_and_count,
    sum_and_count_where,
)
from student_trainer.data.packing import Layout
from student_trainer.losses import (
    Direction,
    FusedLoss,
    Index,
    LossFunction,
    Rows,
    Tail,
    draw_noise,
    importance_weights,
    mismatch,
    topk_kl,
    weight_loss,
)

# Mean squared norm of a token's gradient in the logits; a smaller gradient is float32 rounding.
EQUAL_POLICIES = 1e-10


@dataclass(frozen=True)
class DistillationObjective:
    """Minimises KL + cross_entropy * (-log p of the stored token), per token, in nats.

    - direction, tail: see `topk_kl`.
    - temperature: temperature of the student's distribution.
    - cross_entropy: weight of the second term, which only stored sequences have.
    - teachers: the names of the job's teachers. Each has its own KL metric.
    """

    direction: Direction
    tail: Tail
    temperature: float
    cross_entropy: float = 0.0
    teachers: tuple[str, ...] = ()

    needs_all_rows = False

    @classmethod
    def on_policy(
        cls, method: OnPolicyConfig, teachers: Sequence[str] = ()
    ) -> DistillationObjective:
        """Return the objective of an on-policy job.

        `teachers`: the teacher names; empty if the job has one teacher.
        """
        direction: Direction = "reverse" if method.divergence == "reverse_kl" else "forward"
        return cls(direction, method.tail_mode, method.temperature, teachers=tuple(teachers))

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> Batch:
        """Make the tensors of one micro-batch; see `make_batch`."""
        return make_batch(scored_sequences, device, layout)

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch as a function of rows, multiplied by the sequence weights.

        See `distillation_loss`.
        """
        return weight_loss(distillation_loss(batch, self), batch.sequence_weights)

    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric of the batch; see `batch_metrics`."""
        return batch_metrics(batch, out, self)

    @torch.no_grad()
    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the held-out metrics: the name in metrics.jsonl and one value per token, [n]."""
        kl, is_unbiased = measured_kl(batch, out, self)
        metrics = {"eval/kl" if is_unbiased else "eval/kl_bound": kl}
        if batch.sampling_logprobs is None:
            metrics["eval/perplexity"] = -out.rows.token_logprobs
        return metrics

    @torch.no_grad()
    def token_logprobs(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the log-prob of each token, [n] in nats, for the keys "student" and "teacher"."""
        return {"student": out.rows.token_logprobs, "teacher": batch.teacher.token_logprobs}

    def tail_of(self, batch: Batch) -> Tail:
        """Return the tail mode for a batch.

        The mode `bucket+teacher_samples` needs ids that the teacher drew. If the batch has none, as
        may be the case for tokens that the student sampled, the mode is `bucket+sampled`. Both
        modes have the same expectation.
        """
        drawn_by_teacher = self.tail == "bucket+teacher_samples"
        return "bucket+sampled" if drawn_by_teacher and batch.sample_ids is None else self.tail


def distillation_loss(batch: Batch, objective: DistillationObjective) -> LossFunction:
    """Return the loss of the batch: a function from rows to one term per token, [n] in nats.

    The sampled part of the KL has importance weights. The policy that sampled the tokens differs
    from the student in precision, in its program, or in the age of its weights.
    """
    in_head, sampling = batch.token_in_head, batch.sampling_logprobs
    tail, draws = objective.tail_of(batch), batch.draw_logprobs
    # Tokens that the student sampled are no targets of the cross-entropy.
    weight = objective.cross_entropy if sampling is None else 0.0

    def loss(rows: Rows, index: Index) -> Tensor:
        importance = None
        if sampling is not None:
            importance = importance_weights(rows.token_logprobs, sampling[index])
        kl = topk_kl(
            rows,
            batch.teacher[index],
            in_head[index],
            direction=objective.direction,
            tail=tail,
            importance=importance,
            draw_logprobs=None if draws is None else draws[index],
        )
        return kl - weight * rows.token_logprobs if weight else kl

    return loss


@torch.no_grad()
def batch_metrics(
    batch: Batch, out: FusedLoss, objective: DistillationObjective
) -> dict[str, Tensor]:
    """Return (sum, number) of each metric over the tokens of a batch. No gradient.

    - kl/teacher: an unbiased estimate of the KL in nats, for every tail mode of the loss.
    - kl/teacher_bound: a lower bound of the KL, for rows without samples; they have no
      `kl/teacher`.
    - kl/teacher/NAME: for each of the objective's `teachers`, the KL of the tokens that it scored.

    The names are the same for all batches.
    """
    rows = out.rows
    sampling = batch.sampling_logprobs
    is_sampled = sampling is not None
    mismatch_sums = mismatch(
        rows.token_logprobs, rows.token_logprobs if sampling is None else sampling
    )
    kl, is_unbiased = measured_kl(batch, out, objective)
    return {
        "kl/teacher": sum_and_count(kl, is_unbiased),
        "kl/teacher_bound": sum_and_count(kl, not is_unbiased),
        "cross_entropy": sum_and_count(-rows.token_logprobs, not is_sampled),
        **{name: pair * is_sampled for name, pair in mismatch_sums.items()},
        "entropy": sum_and_count(out.metrics["entropy"]),
        "topk/student_mass": sum_and_count(rows.head_logprobs.exp().sum(1)),
        "topk/teacher_mass": sum_and_count(batch.teacher.head_logprobs.exp().sum(1)),
        "topk/gradient_sd": gradient_noise(batch, rows, batch.teacher, kl),
        **_kl_by_teacher(batch, kl, objective.teachers),
    }


@torch.no_grad()
def measured_kl(
    batch: Batch, out: FusedLoss, objective: DistillationObjective
) -> tuple[Tensor, bool]:
    """Return the KL of each token, [n] in nats, and True if it is unbiased.

    Otherwise the KL is a lower bound.
    """
    is_unbiased = batch.sampling_logprobs is not None or batch.sample_ids is not None
    tail: Tail = "bucket+teacher_samples" if is_unbiased else "bucket"
    if batch.draw_logprobs is not None:
        tail = "bucket+draws"
    unbiased_objective = DistillationObjective(objective.direction, tail, objective.temperature)
    return distillation_loss(batch, unbiased_objective)(
        out.rows, slice(0, len(out.rows))
    ), is_unbiased


@torch.no_grad()
def gradient_noise(batch: Batch, rows: Rows, teacher: Rows, kl: Tensor) -> Tensor:
    """Return (variance, squared norm) [2] of the gradients of a batch, summed over its tokens.

    See `draw_noise`. `kl` [n]: the KL, measured with the draws. The result is (0, 0) if rows have
    fewer than 2 draws, or if student and teacher are equal except for rounding errors.
    """
    ids, draws = batch.sample_ids, batch.draw_logprobs
    if ids is None or draws is None or draws.shape[1] < 2:
        return kl.new_zeros(2)
    variance, squared_norm = draw_noise(rows, teacher, ids, draws, kl)
    noise = torch.stack([variance.sum(), squared_norm.sum()])
    return torch.where(squared_norm.mean() > EQUAL_POLICIES, noise, torch.zeros_like(noise))


def _kl_by_teacher(batch: Batch, kl: Tensor, teachers: Sequence[str]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for name in teachers:
        is_scored_by_teacher = torch.tensor(
            [teacher == name for teacher in batch.teachers], dtype=torch.bool
        )
        mask = copy_to_device(is_scored_by_teacher, kl.device)[batch.sequence]
        sums[f"kl/teacher/{name}"] = sum_and_count_where(mask, kl)
    return sums
