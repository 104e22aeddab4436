"""`kill -9` of processes that save all the time, as often as DISTILL_REPEATS says: none is lost.

Each kill hits one process of one or two, at a random moment after its first save has begun. The
others end with it, and the next ones continue from the newest checkpoint.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.atomic_directory import is_intact
from student_trainer.parallel.shards import local, own_slices
from tests.faults.conftest import REPEATS
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.saving import saver_of
from tests.student_trainer.teachers.anchors import spread_student, theta

KEEP = 2
LONGEST = 0.4  # seconds after the first save; some saves are complete by then, some are not


def train(root: Path, published: Path, begun_mark: Path) -> None:
    """Train without end from the newest checkpoint; save every second step."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo logs errors when the other rank is killed
    student = spread_student(tiny.model(layers=2), "fsdp2")
    model = student.trained.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    main = os.environ.get("RANK", "0") == "0"

    def note() -> None:
        checkpoint.delete_old(root, KEEP)
        newest = max(int(path.name[5:]) for path in root.glob("step-*"))
        with published.open("a") as file:
            file.write(f"{newest}\n")

    saver = saver_of(root, model, tiny.tokenizer(), after_publication=note)
    latest = checkpoint.newest_checkpoint(root)
    step = 0 if latest is None else latest[0]
    if latest is not None:
        checkpoint.load_optimizer(latest[1], model, optimizer)
    while True:
        step += 1
        saver.poll()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                local(parameter).copy_(theta(name, parameter, step)[own_slices(parameter)])
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        if step % 2 == 0:
            saver.save(step, checkpoint.collect_contents(model, optimizer))
            if main:
                begun_mark.touch()


def steps_of(published: Path) -> list[int]:
    if not published.exists():
        return []
    lines = published.read_text().splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n")]


def assert_intact(root: Path, published: Path) -> int:
    """Assert that all visible checkpoints are intact and none is lost; return the newest step."""
    assert all(is_intact(path) for path in root.glob("step-*"))
    latest = checkpoint.newest_checkpoint(root)
    step, path = (0, None) if latest is None else latest
    assert step >= max(steps_of(published), default=0)
    if path is not None:
        stored = load_file(path / "model" / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors")
        assert stored
        for name, weight in stored.items():
            assert torch.equal(weight, theta(name, weight, step)), (name, step)
            assert moments[f"{name}/step"].item() == step
    return step


@pytest.mark.timeout(120 + 10 * REPEATS)
def test_saves_that_are_killed(tmp_path: Path) -> None:
    numbers = random.Random(0)
    root, published = tmp_path / "checkpoints", tmp_path / "published"
    root.mkdir()
    torn_saves, steps = 0, [0]
    for repeat in range(REPEATS):
        begun_mark, group = tmp_path / f"begun-{repeat}", tmp_path / f"group-{repeat}"
        world = numbers.choice((1, 2))
        forks = Forks(world, group, train, root, published, begun_mark)
        while not begun_mark.exists():
            assert forks.poll() is None
            time.sleep(0.002)
        time.sleep(numbers.uniform(0, LONGEST))
        while repeat == REPEATS - 1 and not published.exists():
            assert forks.poll() is None
            time.sleep(0.002)
        forks.processes[numbers.randrange(world)].kill()
        forks.wait()
        torn_saves += any(root.glob(".step-*.tmp"))
        steps.append(assert_intact(root, published))
        assert steps[-1] >= steps[-2]
    saves = len(steps_of(published))
    print(f"{REPEATS} kills, {torn_saves} of them in a save; {saves} checkpoints published, 0 lost")
    assert torn_saves > 0 or REPEATS < 20, "no kill hit a save"
    assert saves > 0
