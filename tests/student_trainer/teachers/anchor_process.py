"""One of several gloo processes with shards of an anchor, and the report of each."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from student_trainer.checkpoints import checkpoint
from student_trainer.parallel.shards import local
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.teacher_input import privileged_prompt
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint
from tests.student_trainer.teachers.anchors import (
    move,
    rollouts,
    rows_of,
    spread_student,
    teacher_of,
)

TAU, PERIOD = 0.9, 2


def run_process(
    out: Path, sharding: str, until: int, resumed_checkpoint: Path | None = None
) -> Path:
    """Update the student, from step 1 or `resumed_checkpoint`; write a report and a checkpoint."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    words, model = tiny.tokenizer(), tiny.model(seed=2, layers=2)
    student = spread_student(model, sharding)
    anchor = Anchor(student, tau=TAU, update_period=PERIOD)
    if resumed_checkpoint is not None:
        checkpoint.load_anchor(resumed_checkpoint, anchor)
    for update in range(anchor.updates + 1, until + 1):
        move(student, anchor, update)
    numbers = range(rank, len(rollouts()), world)
    blocks = rows_of(teacher_of(anchor, student), [rollouts()[number] for number in numbers])
    report = {
        "gap": anchor.gap(),
        "version": anchor.version,
        "elements": sum(local(share).numel() for share in anchor.state().values()),
        "rows": {
            number: [block.head_logprobs.tolist(), block.tail_logmass.tolist()]
            for number, block in zip(numbers, blocks, strict=True)
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    save_checkpoint(
        out,
        anchor.updates,
        model=student.trained.model,
        tokenizer=words,
        optimizer=torch.optim.AdamW(student.trained.model.parameters()),
        anchor=anchor,
    )
    return checkpoint.checkpoint_path(out, until)


def run_processes(
    world: int, out: Path, sharding: str, until: int, resumed_checkpoint: Path | None = None
) -> Path:
    """Run `run_process` in `world` processes, and return the checkpoint."""
    forks = Forks(
        world, out.with_suffix(".group"), run_process, out, sharding, until, resumed_checkpoint
    )
    assert forks.wait() == [0] * world
    return checkpoint.checkpoint_path(out, until)


def score_without_a_column(out: Path) -> None:
    """Score with a sample in the second process that lacks a column of the context."""
    rank = int(os.environ["RANK"])
    student = spread_student(tiny.model(seed=2), "fsdp2")
    teacher = teacher_of(
        Anchor(student, tau=TAU, update_period=PERIOD),
        student,
        prompt=privileged_prompt("{hint}", PromptFormat(template="{prompt}"), tiny.tokenizer()),
    )
    (rollout,) = rollouts(1)
    try:
        rows_of(teacher, [rollout if rank == 0 else replace(rollout, fields={})])
    except InvalidInput as error:
        (out / f"rank-{rank}.json").write_text(json.dumps(str(error)))


def read_reports(out: Path) -> list[Any]:
    """Return the report of each process, by rank."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
