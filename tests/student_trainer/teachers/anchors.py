"""Anchors of small students, with updates that tests can repeat."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from clients.config.tables.common import StudentConfig
from protos.rows.codec import RowBlock
from student_trainer.data.sequence import Rollout
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.sharding import Replicated, Sharded, distribute
from student_trainer.parallel.shards import local, own_slices
from student_trainer.teachers.anchor import Anchor, AnchorTeacher

TEMPERATURE = 1.3
LIMIT = timedelta(minutes=10)


def spread_student(
    model: Any,
    sharding: str = "none",
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    *,
    pack: bool = False,
    bf16: bool = False,
) -> Replicated | Sharded:
    accelerator = make_accelerator(LIMIT)
    student = Student(model, bf16=bf16)
    distributed = distribute(accelerator, student, sharding, tensor_parallel, context_parallel)
    if pack:
        distributed.choose_attention(StudentConfig(model="-"))
    return distributed


def theta(name: str, like: Tensor, update: int) -> Tensor:
    """Return the full weight after an update."""
    generator = torch.Generator().manual_seed(1000 * update + sum(name.encode()))
    return 0.3 * torch.randn(like.shape, generator=generator)


def move(student: Replicated | Sharded, anchor: Anchor, update: int) -> None:
    """Set the student's weights to those of an update, and update the anchor."""
    with torch.no_grad():
        for name, parameter in student.trained.model.named_parameters():
            if parameter.requires_grad:
                local(parameter).copy_(theta(name, parameter, update)[own_slices(parameter)])
    anchor.after_update()


def rollouts(count: int = 7, top_k: int = 4) -> list[Rollout]:
    """Return rollouts of different lengths, with unordered head ids."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for number in range(count):
        start, length = 1 + number % 3, 1 + number % 5
        ids = torch.randint(13, (start + length,), generator=generator)
        heads = [torch.randperm(13, generator=generator)[:top_k] for _ in range(length)]
        columns = {"answer": str(number), "hint": f"{number}+{number}", "text": "1+2="}
        sequences.append(
            Rollout(
                token_ids=ids,
                start=start,
                head_ids=torch.stack(heads).int(),
                token_logprobs=torch.zeros(length),
                truncated=False,
                answer=columns["answer"],
                fields=columns,
                text=columns["text"],
            )
        )
    return sequences


def teacher_of(anchor: Anchor, student: Replicated | Sharded, **options: Any) -> AnchorTeacher:
    return AnchorTeacher(
        anchor,
        student,
        make_accelerator(LIMIT),
        temperature=TEMPERATURE,
        tokens_per_micro_batch=16,
        **options,
    )


def rows_of(teacher: AnchorTeacher, sequences: Sequence[Rollout]) -> list[RowBlock]:
    """Score as a step does: all rollouts first, then `finish`."""
    futures = [teacher.score(rollout) for rollout in sequences]
    teacher.finish()
    return [future.result(timeout=0) for future in futures]
