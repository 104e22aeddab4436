"""The gradients of an update, without the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from student_trainer.loop.trainer import Trainer


def add_gradients(trainer: Trainer, pending: Sequence[Any]) -> dict[str, float]:
    """Add up the gradients of an update. Returns the means of its metrics; grad_norm is 0."""
    sums, _ = trainer.learner.add_gradients(pending)
    return sums.read_means(trainer.accelerator, torch.zeros(()))
