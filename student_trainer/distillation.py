"""On-policy distillation as a loss of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clients.config import OnPolicyConfig
from student_trainer.batches import Batch
from student_trainer.losses import Direction, FusedLoss, LossFunction, Rows, topk_kl


def direction_of(method: OnPolicyConfig) -> Direction:
    return "reverse" if method.divergence == "reverse_kl" else "forward"


def distillation_loss(batch: Batch, method: OnPolicyConfig) -> LossFunction:
    """The Top-k KL to the teacher, in nats a token."""
    in_head = batch.token_in_head

    def loss(rows: Rows, index: slice) -> Tensor:
        return topk_kl(
            rows,
            batch.teacher[index],
            in_head[index],
            direction=direction_of(method),
            tail=method.tail,
        )

    return loss


@torch.no_grad()
def kl_metrics(
    batch: Batch, out: FusedLoss, method: OnPolicyConfig, teachers: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Sums over the batch's tokens; the KL is the unbiased one, whatever the loss is.

    For each of `teachers` also the sum over its own tokens, and their number.
    """
    rows = out.rows
    kl = topk_kl(
        rows,
        batch.teacher,
        batch.token_in_head,
        direction=direction_of(method),
        tail="bucket+sampled",
    )
    return {
        "kl/teacher": kl.sum(),
        "ratio/mean": (rows.token_logprobs - batch.sampling_logprobs).exp().sum(),
        "entropy": out.metrics["entropy"].sum(),
        "topk/student_mass": rows.head_logprobs.exp().sum(),
        "topk/teacher_mass": batch.teacher.head_logprobs.exp().sum(),
        **_by_teacher(batch, kl, teachers),
    }


def _by_teacher(batch: Batch, kl: Tensor, teachers: Sequence[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in teachers:
        scored = torch.tensor([teacher == name for teacher in batch.teachers], dtype=torch.bool)
        rows = scored.to(kl.device)[batch.sequence]
        found |= {f"kl/teacher/{name}": kl[rows].sum(), f"tokens/{name}": rows.sum()}
    return found


def pop_kl_by_teacher(sums: dict[str, float], teachers: Sequence[str]) -> dict[str, float]:
    """Take what `kl_metrics` summed for each teacher out of `sums`; nats a token of its own.

    A teacher that scored nothing is left out.
    """
    pairs = {n: (sums.pop(f"kl/teacher/{n}"), sums.pop(f"tokens/{n}")) for n in teachers}
    return {f"kl/teacher/{name}": kl / tokens for name, (kl, tokens) in pairs.items() if tokens}
