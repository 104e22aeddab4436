"""What the trainer is given: the sequences of a step, and what is to be made small on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.losses import FusedLoss, LossFunction
from student_trainer.teachers.source import PendingRows


@dataclass(frozen=True)
class Step:
    """This process's share: the sequences of each optimizer update, which are made in this order.

    measured: (sum, number) of metrics, to be summed over processes, under the same names in all;
    seconds: of metrics `time/...`, the main process's.
    """

    updates: Sequence[Sequence[PendingRows]]
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


# Step number (from 1) -> a pure function of it and of the student's weights. Every process calls.
Steps = Callable[[int], Step]


def one_update(of_step: Callable[[int], list[PendingRows]]) -> Steps:
    """Steps of one update each."""
    return lambda step: Step([of_step(step)])


class Objective(Protocol):
    """What is made small: a loss of each token, of which the trainer takes the mean."""

    @property
    def temperature(self) -> float:
        """Of the student's distribution."""

    @property
    def of_all_rows(self) -> bool:
        """Whether the loss must see all rows of a batch at once; it costs a product more."""

    def batch(self, scored: Sequence[ScoredSequence], device: torch.device, *, pack: bool) -> Batch:
        """Of one micro-batch."""

    def loss(self, batch: Batch) -> LossFunction:
        """Its terms, one a token."""

    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """(sum, number) of each metric, the same names for every batch."""
