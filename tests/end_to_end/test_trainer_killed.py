"""`kill -9` of the trainer, anywhere: the run comes to the same bits."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import Death, finish, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights
from tests.faults.conftest import REPEATS

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# Moments of a save at which the trainer dies, after it has written several files.
IN_SAVES: list[Death] = [
    ("open", ".tmp/model/tokenizer_config.json", 1),  # before any tensor is written
    ("open", ".tmp/manifest.json", 1),  # everything but the manifest is written
    ("open", ".tmp/optimizer.safetensors", 1),  # only the weights are written
    ("os.rename", "checkpoints/.step-", 1),  # just before the checkpoint becomes visible
]
IN_EXPORT: Death = ("os.rename", ".export.", 1)


def die_at(run: RunDirectory, attempt: int, *death: Any) -> None:
    with trainer(run, attempt, death=death) as process:
        assert process.wait() == -signal.SIGKILL, process.log


def kill_at(run: RunDirectory, attempt: int, step: int) -> None:
    with trainer(run, attempt) as process:
        process.wait_for_step(step)
        process.kill()


def assert_same(run: RunDirectory, undisturbed: RunDirectory) -> None:
    from tests.student_trainer.tiny import curve

    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)
    names = [
        sorted(path.name for path in directory.checkpoints.iterdir())
        for directory in (run, undisturbed)
    ]
    assert names[0] == names[1], "leftovers"


def test_killed_anywhere(
    material: Material, teacher: str, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """At random steps, inside saves and inside the export: 11 times in `make test-all`, or 7."""
    from tests.student_trainer.tiny import job

    run = new_run(tmp_path / "run", job(material, teacher))
    random_kills = 6 if REPEATS >= 20 else 2
    steps = sorted(random.Random(0).sample(range(1, 40), random_kills))
    plan: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for number, step in enumerate(steps):
        plan.append((kill_at, (step,)))
        plan += [(die_at, death) for death in IN_SAVES[number::random_kills]]
    plan.append((die_at, IN_EXPORT))
    executed_steps: set[tuple[int, int]] = set()
    torn_saves = 0
    for attempt, (kill, arguments) in enumerate(plan, 1):
        kill(run, attempt, *arguments)
        executed_steps |= {(line["attempt"], line["step"]) for line in metrics_of(run)}
        if kill is die_at:
            partial_directories = [
                *run.checkpoints.glob(".step-*.tmp"),
                *run.path.glob(".export.*.tmp"),
            ]
            torn_saves += bool(partial_directories)
    assert not run.export.exists()
    finish(run, len(plan) + 1)

    redone = len(executed_steps) - len(metrics_of(undisturbed))
    print(f"{len(plan)} kills, {torn_saves} of them in a save; {redone} steps were done again")
    assert (len(plan), torn_saves) == (random_kills + 5, 5)
    assert redone > 0
    assert_same(run, undisturbed)
