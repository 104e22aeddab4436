"""The two inputs of the trainer: the sequences of a step, and the objective to minimise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.packing import Layout
from student_trainer.losses import FusedLoss, LossFunction
from student_trainer.teachers.source import PendingRows


@dataclass(frozen=True)
class Step:
    """This process's share of a step.

    updates: the sequences of each optimizer update, in the order of the updates. metric_sums:
    metrics as tensors (sum, number), which the trainer sums over all processes; the names must be
    equal on all ranks. seconds: metrics `time/...` in seconds; those of the main process are
    logged.
    """

    updates: Sequence[Sequence[PendingRows]]
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


# Step number (from 1) -> Step: a pure function of the number and the student's weights. Collective.
Steps = Callable[[int], Step]


def one_update(of_step: Callable[[int], list[PendingRows]]) -> Steps:
    """Return steps of one optimizer update each. `of_step`: returns the sequences of a step."""
    return lambda step: Step([of_step(step)])


class Objective(Protocol):
    """The objective to minimise: a loss of each token, which the trainer averages."""

    @property
    def temperature(self) -> float:
        """Temperature of the student's distribution: its logits are divided by it."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether the loss needs all rows of a batch at once; costs one more matrix product."""

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> Batch:
        """Make the tensors of one micro-batch on `device`. `layout`: as in `make_batch`."""

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch as a function of the student's rows: one term per token."""

    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric, under the same names for every batch."""
