"""Forward passes of a student over whole sequences, without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from student_trainer.data.batch import Batch, NumberedSequence, make_batch, placeholder_rows
from student_trainer.data.packing import micro_batches
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.student import Student


@torch.no_grad()
def of_rollouts(
    student: Student,
    rollouts: Sequence[TokenSequence],
    of_batch: Callable[[Batch], Tensor],
    *,
    tokens_per_micro_batch: int,
    device: torch.device,
) -> list[Tensor]:
    """Return one tensor [learned, ...] per rollout, from one forward pass per micro-batch.

    `of_batch`: returns a tensor of the N rows of a batch, whose only head id is 0. The rollouts are
    grouped as the trainer groups the sequences of an update.
    """
    read = [
        NumberedSequence(one, placeholder_rows(np.zeros((one.learned, 1), np.int32)), number)
        for number, one in enumerate(rollouts)
    ]
    found: dict[int, Tensor] = {}
    for group in micro_batches(read, tokens_per_micro_batch, student.layout):
        batch = make_batch(group, device, student.layout)
        parts = torch.split(of_batch(batch), [item.sequence.learned for item in group])
        found |= {item.number: part for item, part in zip(group, parts, strict=True)}
    return [found[number] for number in range(len(rollouts))]
