"""Forward passes of the student without a gradient, over batches that all processes have.

A sharded student gathers its weights layer by layer for them, so a process never needs memory for
all of them, and the arithmetic is that of learning.
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
Found = TypeVar("Found")


@torch.no_grad()
def in_passes(
    student: Replicated | Sharded,
    groups: Sequence[Group],
    batch_of: Callable[[Group], AnyBatch],
    of_batch: Callable[[AnyBatch], Found],
) -> list[Found]:
    """Collective. Return `of_batch` of the batch of each group of this process, if it has any.

    `batch_of`: makes the batch of a group, when its turn comes. `of_batch`: calls `forward`, `rows`
    or `states` of `student`, equally often in every process. With a sharded student it also runs
    for batches of other processes, and without rows. Call it outside `student.gathered()`.
    """
    found = []
    with student.passes():
        for number, batch in enumerate(student.shared_batches(groups, batch_of)):
            for one, own in student.batches_of_group(batch):
                result = of_batch(one)
                if own and number < len(groups):
                    found.append(result)
    return found


def of_rollouts(
    student: Replicated | Sharded,
    rollouts: Sequence[TokenSequence],
    of_batch: Callable[[Batch], Tensor],
    *,
    tokens_per_micro_batch: int,
) -> list[Tensor]:
    """Collective. Return one tensor [learned, ...] for each rollout of this process.

    `of_batch`: see `in_passes`; returns a tensor of the N rows of a batch, whose only head id is 0.
    The rollouts are grouped as the trainer groups the sequences of an update.
    """
    read = [
        NumberedSequence(one, placeholder_rows(np.zeros((one.learned, 1), np.int32)), number)
        for number, one in enumerate(rollouts)
    ]
    layout = student.trained.layout
    groups = micro_batches(read, tokens_per_micro_batch, layout)
    batch_of = partial(make_batch, device=student.device, layout=layout)
    found: dict[int, Tensor] = {}
    for group, of_rows in zip(groups, in_passes(student, groups, batch_of, of_batch), strict=True):
        parts = torch.split(of_rows, [item.sequence.learned for item in group])
        found |= {item.number: part for item, part in zip(group, parts, strict=True)}
    return [found[number] for number in range(len(rollouts))]
