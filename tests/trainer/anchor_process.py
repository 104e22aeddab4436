"""One of several processes over gloo that share an anchor, and what each of them says of it."""

from __future__ import annotations

import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from student_trainer import checkpoint
from student_trainer.anchor import Anchor
from student_trainer.parallel import local
from tests.trainer import tiny
from tests.trainer.anchors import move, rollouts, spread_student, teacher_of

TAU, PERIOD = 0.9, 2
# Imports, once for all processes.
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.trainer.anchor_process"])


def work(out: Path, sharding: str, until: int, resumed: Path | None = None) -> Path:
    """Updates of the student, from the first or from the checkpoint `resumed` on, and a save."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    words, model = tiny.tokenizer(), tiny.model(seed=2, layers=2)
    student = spread_student(model, sharding)
    anchor = Anchor(student, tau=TAU, update_period=PERIOD)
    if resumed is not None:
        checkpoint.load_anchor(resumed, anchor)
    for update in range(anchor.updates + 1, until + 1):
        move(student, anchor, update)
    numbers = range(rank, len(rollouts()), world)
    blocks = teacher_of(anchor, student).score_all([rollouts()[number] for number in numbers])
    said = {
        "gap": anchor.gap(),
        "version": anchor.version,
        "elements": sum(local(share).numel() for share in anchor.state().values()),
        "rows": {
            number: [block.head_logprobs.tolist(), block.tail_logmass.tolist()]
            for number, block in zip(numbers, blocks, strict=True)
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    checkpoint.save_checkpoint(
        out,
        anchor.updates,
        model=student.trained.model,
        tokenizer=words,
        optimizer=torch.optim.AdamW(student.trained.model.parameters()),
        anchor=anchor,
        main=rank == 0,
    )
    return checkpoint.checkpoint_path(out, until)


def run(world: int, out: Path, sharding: str, until: int, resumed: Path | None = None) -> Path:
    """`work` in so many processes; the checkpoint."""
    processes = [
        _FORKS.Process(target=_enter, args=(rank, world, out, sharding, until, resumed))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    for process in processes:
        process.kill()
    assert [process.exitcode for process in processes] == [0] * world
    return checkpoint.checkpoint_path(out, until)


def said(out: Path) -> list[dict[str, Any]]:
    """What each process said, by rank."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]


def _enter(rank: int, world: int, out: Path, *how: Any) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # By a file: no port that somebody else could take.
    dist.init_process_group("gloo", init_method=f"file://{out}.group", rank=rank, world_size=world)
    try:
        work(out, *how)
    finally:
        dist.destroy_process_group()
