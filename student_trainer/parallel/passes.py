"""Collective forward passes of the student without a gradient.

In these passes, a sharded student gathers its weights layer by layer, so no process needs memory
for all weights. The arithmetic is the same as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from student_trainer.data.batch import Batch, NumberedSequence, make_batch, placeholder_rows
from student_trainer.data.packing import micro_batches
from student_trainer.data.sequence import TokenSequence
from student_trainer.parallel.sharding import Replicated, Sharded

AnyBatch = TypeVar("AnyBatch", bound=Batch)
Group = TypeVar("Group")
Computed = TypeVar("Computed")


@torch.no_grad()
def run_passes(
    student: Replicated | Sharded,
    groups: Sequence[Group],
    batch_of: Callable[[Group], AnyBatch],
    compute: Callable[[AnyBatch], Computed],
) -> list[Computed]:
    """Collective. Build the batch of each group of this process, and return `compute(batch)` for
    each.

    - groups: the groups of this process; may be empty.
    - batch_of: returns the batch of a group. It is called just before the pass of the batch.
    - compute: runs `forward`, `rows` or `states` of `student` on a batch, the same number of times
      in every process. With a sharded student, it also runs on batches of other processes, and on
      batches without rows.

    Call this function outside `student.gathered()`.
    """
    results = []
    with student.passes():
        for number, batch in enumerate(student.shared_batches(groups, batch_of)):
            for group_batch, is_own in student.batches_of_group(batch):
                computed = compute(group_batch)
                if is_own and number < len(groups):
                    results.append(computed)
    return results


def run_passes_over_rollouts(
    student: Replicated | Sharded,
    rollouts: Sequence[TokenSequence],
    compute: Callable[[Batch], Tensor],
    *,
    tokens_per_micro_batch: int,
) -> list[Tensor]:
    """Collective. Return a tensor [learned, ...] for each rollout of this process.

    `compute`: see `run_passes`. It returns a tensor [N, ...] for the N rows of a batch. The only
    head id of these rows is 0. The rollouts are grouped in the same way as the trainer groups the
    sequences of an update.
    """
    sequences = [
        NumberedSequence(
            rollout, placeholder_rows(np.zeros((rollout.learned, 1), np.int32)), number
        )
        for number, rollout in enumerate(rollouts)
    ]
    layout = student.trained.layout
    groups = micro_batches(sequences, tokens_per_micro_batch, layout)
    batch_of = partial(make_batch, device=student.device, layout=layout)
    tensors: dict[int, Tensor] = {}
    for group, batch_tensor in zip(
        groups, run_passes(student, groups, batch_of, compute), strict=True
    ):
        parts = torch.split(batch_tensor, [numbered.sequence.learned for numbered in group])
        tensors |= {numbered.number: part for numbered, part in zip(group, parts, strict=True)}
    return [tensors[number] for number in range(len(rollouts))]
