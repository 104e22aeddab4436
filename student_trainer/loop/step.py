"""The inputs of the trainer: the sequences of a step and the objective, and the metrics of both."""

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
    """This process's share of a step.

    - updates: the sequences of each optimizer update, in the order of the updates.
    - metric_sums: metrics as tensors (sum, number) on the CPU, which the trainer sums over all
      processes; the names must be equal on all ranks.
    - seconds: metrics `time/...` in seconds; only the main process logs them.
    """

    updates: Sequence[Sequence[PendingRows]]
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


# Step number (from 1) -> Step: a pure function of the number and the student's weights. Collective.
Steps = Callable[[int], Step]


def one_update(of_step: Callable[[int], list[PendingRows]]) -> Steps:
    """Return a source of steps with one optimizer update each. `of_step`: returns the sequences of
    a step.
    """
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
        """Build the tensors of one micro-batch on `device`. For `layout`, see `make_batch`."""

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of the batch as a function of the student's rows: one term per token."""

    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric, under the same names for every batch."""


def count_lengths(pending: Sequence[PendingRows]) -> dict[str, Tensor]:
    """Return (sum, number) of sequence lengths, truncated rollouts and answer weights."""
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

    `sums`: on one device. The host waits for the device once; not at all for sums of a single
    process on the CPU.
    """
    total = torch.stack([value.double() for value in sums.values()])
    if accelerator.num_processes > 1:
        total = accelerator.reduce(copy_to_device(total, accelerator.device))
    return {
        name: (metric_sum, metric_count)
        for name, (metric_sum, metric_count) in zip(sums, total.tolist(), strict=True)
    }


def compute_means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each metric; the root of the mean for `topk/..gradient_sd`."""
    means = {name: total / count for name, (total, count) in totals.items() if count}
    return {name: mean**0.5 if _SD.fullmatch(name) else mean for name, mean in means.items()}


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates; for tokens, flops and seconds the sum.

    Non-finite values are ignored, unless all values are non-finite.
    """
    means = {}
    for name in updates[0]:
        update_values = [update[name] for update in updates if name in update]
        finite_values = [value for value in update_values if math.isfinite(value)] or update_values
        is_sum = name in ("tokens", "flops") or name.startswith("time/")
        means[name] = sum(finite_values) / (1 if is_sum else len(finite_values))
    return means
