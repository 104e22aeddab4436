"""The interfaces between a method and the trainer: the sequences of a step, and the objective.

This module also computes the means of the metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from student_trainer.data.batch import Batch, ScoredSequence, copy_to_device
from student_trainer.data.packing import Layout
from student_trainer.data.sequence import Rollout
from student_trainer.losses import FusedLoss, LossFunction
from student_trainer.teachers.source import PendingRows

# Metrics whose (sum, number) is a sum of variances and a sum of squares.
_SD = re.compile(r"topk/(\w+_)?gradient_sd")


@dataclass(frozen=True)
class Step:
    """The sequences of a step in this process, and the metrics of sampling them.

    - updates: for each optimizer update, in order, its sequences.
    - metric_sums: (sum, number) of each metric as a tensor on the CPU. The trainer adds them up
      over all processes, so the names must be the same on all ranks.
    - seconds: the metrics `time/...`, in seconds. Only the main process logs them.
    """

    updates: Sequence[Sequence[PendingRows]]
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


# Step number (from 1) -> Step: a pure function of the number and the student's weights. Collective.
Steps = Callable[[int], Step]


def one_update(of_step: Callable[[int], list[PendingRows]]) -> Steps:
    """Return a source of steps with a single optimizer update each.

    `of_step`: a function that returns the sequences of a step.
    """
    return lambda step: Step([of_step(step)])


class Objective(Protocol):
    """The objective that training minimises: a loss of each token, which the trainer averages."""

    @property
    def temperature(self) -> float:
        """The temperature of the student's distribution. The student's logits are divided by it."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether the loss needs all rows of a batch in one call.

        This costs one more matrix product.
        """

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> Batch:
        """Return the tensors of one micro-batch on `device`. See `make_batch` for `layout`."""

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of a batch: a function from the student's rows to one value per token."""

    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric. The names must be the same for every batch."""


def count_lengths(pending: Sequence[PendingRows]) -> dict[str, Tensor]:
    """Return (sum, number) of the sequence lengths and of the truncated rollouts, by metric.

    The entry "counted" is the sum of the sequences' weights in the mean loss.
    """
    rollouts = [item.sequence for item in pending if isinstance(item.sequence, Rollout)]
    tokens = sum(item.sequence.learned for item in pending)
    return {
        "counted": torch.tensor([sum(item.counts for item in pending), 0]),
        "length/mean": torch.tensor([tokens, len(pending)]),
        "length/truncated": torch.tensor(
            [sum(rollout.truncated for rollout in rollouts), len(rollouts)]
        ),
    }


def sum_over_ranks(
    accelerator: Accelerator, sums: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Collective. Return (sum, number) of each metric over all processes.

    `sums`: (sum, number) of each metric of this process. All tensors must be on one device. The
    host waits for the device once. It does not wait if there is a single process and the tensors
    are on the CPU.
    """
    total = torch.stack([value.double() for value in sums.values()])
    if accelerator.num_processes > 1:
        total = accelerator.reduce(copy_to_device(total, accelerator.device))
    return {
        name: (metric_sum, metric_count)
        for name, (metric_sum, metric_count) in zip(sums, total.tolist(), strict=True)
    }


def compute_means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each metric from its (sum, number).

    For a metric `topk/..gradient_sd`, returns the square root of the mean.
    """
    means = {name: total / count for name, (total, count) in totals.items() if count}
    return {name: mean**0.5 if _SD.fullmatch(name) else mean for name, mean in means.items()}


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from the metrics of its updates.

    The result is the sum for tokens, flops and seconds, and the mean for all other metrics. Values
    that are not finite are ignored if any value of the metric is finite.
    """
    means = {}
    for name in updates[0]:
        update_values = [update[name] for update in updates if name in update]
        finite_values = [value for value in update_values if math.isfinite(value)] or update_values
        is_sum = name in ("tokens", "flops") or name.startswith("time/")
        means[name] = sum(finite_values) / (1 if is_sum else len(finite_values))
    return means
