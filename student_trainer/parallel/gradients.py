"""Clipping of gradients, which may be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import full_tensor, local


def clip_gradients(student: Replicated | Sharded, max_norm: float) -> float:
    """Collective. Scale the gradients of `student`, in place, to a norm of at most `max_norm`.

    Returns the norm before clipping, over the weights of all processes. With tensor parallelism,
    gradients of weights that a group does not divide are averaged over its processes first.
    """
    weights = [weight for weight in student.trained.parameters() if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if len({gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}) <= 1:
        return float(full_tensor(clip_grad_norm_(weights, max_norm)))
    # With tensor parallelism there are two meshes, and torch's norm takes gradients of one only.
    assert isinstance(student, Sharded)
    student.average_in_group(gradients)
    norm = _compute_norm(student, gradients)
    clip_grads_with_norm_(weights, max_norm, norm, foreach=False)
    return float(norm)


def _compute_norm(student: Sharded, gradients: Sequence[Tensor]) -> Tensor:
    """Collective. Return the norm of sharded gradients."""
    squares = torch.zeros(1, dtype=torch.float64, device=student.device)
    for gradient in gradients:
        if student.counts_share_of(gradient):
            squares += torch.linalg.vector_norm(local(gradient), dtype=torch.float64).square()
    return student.sum_over_shards(squares).sqrt().squeeze()
