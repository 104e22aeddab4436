"""The metrics of a step: counts of its sequences, means over tokens and over updates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from student_trainer.data.rollout import Rollout
from student_trainer.teachers.source import PendingRows

# Metrics that are sums of variances over sums of squares.
_SD = re.compile(r"topk/(\w+_)?gradient_sd")


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
    """Collective. Return (sum, number) of each metric over all processes."""
    stacked = torch.stack([value.double().cpu() for value in sums.values()])
    total = accelerator.reduce(stacked.to(accelerator.device))
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

    Values that are not finite are left out, unless all are.
    """
    means = {}
    for name in updates[0]:
        update_values = [update[name] for update in updates if name in update]
        finite_values = [value for value in update_values if math.isfinite(value)] or update_values
        is_sum = name in ("tokens", "flops") or name.startswith("time/")
        means[name] = sum(finite_values) / (1 if is_sum else len(finite_values))
    return means
