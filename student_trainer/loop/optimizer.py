"""The optimizer of the student's trainable weights, the learning rate, and gradient clipping."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from clients.config.tables.common import TrainConfig
from clients.runs.metrics_file import Point
from student_trainer.data.batch import copy_to_device
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import full_tensor, local

log = logging.getLogger(__name__)


def make_optimizer(settings: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW (arXiv 1711.05101) for the trainable weights of `model`.

    The fused kernel reads and writes each element once. On a CPU, its update takes a quarter of the
    time of PyTorch's default kernel. If `settings.optimizer` is "adamw_8bit", the moments are
    stored in 8 bits (`adamw_8bit.py`).
    """
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.adam_betas,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimizer == "adamw_8bit":
        # torchao takes seconds to import; only jobs that use it need it.
        from student_trainer.loop.adamw_8bit import RowwiseAdamW8bit

        return RowwiseAdamW8bit(learned, **options)
    return torch.optim.AdamW(learned, **options, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao compiles the update, once for all rates
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(train: TrainConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of `step`, which is at least 1.

    The result depends only on the arguments, so a resumed run needs no scheduler state.
    `train.learning_rate` is the largest rate. At `max_steps`, the schedules "linear" and "cosine"
    have almost reached zero.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    remaining_share = (max_steps - step + 1) / max(1, max_steps - train.warmup_steps)
    match train.schedule:
        case "constant":
            return train.learning_rate
        case "linear":
            return train.learning_rate * remaining_share
        case "cosine":
            return train.learning_rate * (1 - math.cos(math.pi * remaining_share)) / 2


def schedule_warning(train: TrainConfig, max_steps: int) -> str:
    """Return a warning if the warm-up is longer than the run, otherwise ""."""
    if train.warmup_steps <= max_steps:
        return ""
    last = learning_rate(train, max_steps, max_steps)
    return (
        f"train.warmup_steps = {train.warmup_steps} is longer than the run of {max_steps} steps:"
        f" the learning rate ends at {last:.3g}, not at {train.learning_rate:.3g}"
    )


def warn_of_schedule(train: TrainConfig, max_steps: int, last: Point | None) -> None:
    """Log a warning if the warm-up is longer than the run, or if the schedule of a resumed run
    changed.

    `last`: the metrics of the last step before this attempt; None for a new run. If `max_steps` or
    a key of `train` has changed, their learning rate differs from the rate of the current schedule
    at this step.
    """
    if warning := schedule_warning(train, max_steps):
        log.warning("%s", warning)
    if last is None or "lr" not in last.metrics or last.step >= max_steps:
        return
    if not math.isclose(
        last.metrics["lr"], learning_rate(train, last.step, max_steps), rel_tol=1e-6
    ):
        log.warning(
            "the schedule has changed: the learning rate of step %d is %.3g, that of step %d was"
            " %.3g",
            *(last.step + 1, learning_rate(train, last.step + 1, max_steps)),
            *(last.step, last.metrics["lr"]),
        )


def clip_gradients(student: Replicated | Sharded, max_norm: float) -> Tensor:
    """Collective. Scale the gradients of `student`, in place, to a norm of at most `max_norm`.

    Returns the norm of all gradients before the scaling, over all processes. The norm is a scalar
    on the device, and the host does not wait for it. With tensor parallelism, the gradients of
    weights that are not divided in a group are first averaged over the group.
    """
    weights = [weight for weight in student.trained.parameters() if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if len({gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}) <= 1:
        norm = full_tensor(clip_grad_norm_(weights, max_norm))
        return copy_to_device(norm, student.device)
    # With tensor parallelism there are two meshes, and torch's norm takes gradients of one only.
    assert isinstance(student, Sharded)
    student.average_in_group(gradients)
    norm = _compute_norm(student, gradients)
    clip_grads_with_norm_(weights, max_norm, norm, foreach=False)
    return norm


def _compute_norm(student: Sharded, gradients: Sequence[Tensor]) -> Tensor:
    """Collective. Return the norm of the full gradients, of which this process has the shards."""
    squares = torch.zeros(1, dtype=torch.float64, device=student.device)
    for gradient in gradients:
        if student.counts_share_of(gradient):
            squares += torch.linalg.vector_norm(local(gradient), dtype=torch.float64).square()
    return student.sum_over_shards(squares).sqrt().squeeze()
