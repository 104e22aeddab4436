"""`kill -9` of one of two processes that learn from rewards, anywhere, as often as DISTILL_REPEATS
says (2): curve, weights, anchor and critic come to the same bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import finish, run_attempt
from tests.end_to_end.processes import metrics_of, new_run

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

REPEATS = int(os.environ.get("DISTILL_REPEATS", "2"))
# One case for every two kills; cases with a critic come first, as they have more state.
CASES = [("none", "gae"), ("fsdp2", "gae"), ("none", "group"), ("fsdp2", "group")]
# Failpoints of a step, and at which occurrence at most to kill: within two steps.
IN_STEPS = {"gradients-ready": 4, "anchor-moved": 4, "step-done": 2, "checkpoint-part-written": 1}
# Failpoints that only the first process reaches.
IN_SAVES = {"metrics-written": 2, "checkpoint-filled": 1, "checkpoint-renamed": 1}


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * REPEATS)
@pytest.mark.parametrize(("sharding", "advantages"), CASES[: REPEATS // 2])
def test_killed_as_often_as_one_likes(
    material: Material, sharding: str, advantages: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve, rl_job

    config = rl_job(
        material,
        max_steps=2 + 2 * REPEATS,
        train__processes=2,
        train__sharding=sharding,
        checkpoint__every=2,
        method__advantages=advantages,
    )
    undisturbed = finish(new_run(tmp_path / "undisturbed", config))
    run = new_run(tmp_path / "run", config)
    generator = random.Random(31)  # with this seed, the first kill comes after a checkpoint
    executed_steps: set[tuple[int, int]] = set()
    for number in range(1, REPEATS + 1):
        dying_rank = generator.randrange(2)
        moments = IN_STEPS if dying_rank else IN_STEPS | IN_SAVES
        name = generator.choice(sorted(moments))
        spec = f"{name}:kill:{generator.randint(1, moments[name])}"
        assert run_attempt(run, number, dying_rank, spec)[dying_rank] == -signal.SIGKILL, spec
        executed_steps |= {(line["attempt"], line["step"]) for line in metrics_of(run)}
    finish(run, REPEATS + 1)
    executed_steps |= {(line["attempt"], line["step"]) for line in metrics_of(run)}
    print(f"{REPEATS} kills; {len(executed_steps) - config.max_steps - 1} steps were done again")
    attempts = {line["attempt"] for line in metrics_of(run)}
    assert len(attempts) > 1, "every attempt began anew"
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert stored_files(run) == stored_files(undisturbed)
    newest = f"step-{config.max_steps:06d}"
    assert Path(newest, "anchor.safetensors") in stored_files(run)
    assert (Path(newest, "critic.safetensors") in stored_files(run)) == (advantages == "gae")
    assert Path("anchor", "model.safetensors") in stored_files(run)


@pytest.mark.slow
def test_a_killed_student_that_searches(material: Material, tmp_path: Path) -> None:
    """Killed at the checkpoint of the first step, the run resumes to the same bits."""
    from tests.student_trainer.searching import searching_job
    from tests.student_trainer.tiny import curve

    config = searching_job(material, tmp_path, max_steps=2)
    undisturbed = finish(new_run(tmp_path / "undisturbed", config))
    run = new_run(tmp_path / "run", config)
    assert run_attempt(run, 1, 0, "checkpoint-renamed:kill") == [-signal.SIGKILL]
    assert run.checkpoint_steps() == (1,)
    finish(run, 2)
    lines = metrics_of(run)
    assert curve(lines) == curve(metrics_of(undisturbed))
    assert stored_files(run) == stored_files(undisturbed)
    # The line of the first step may not have been written yet.
    assert [line["attempt"] for line in lines] in ([1, 1, 2], [1, 2, 2])
    assert lines[-1]["search/queries"] > 0, "nobody asked"
    assert lines[-1]["grad_norm"] > 0, "nothing was learned"


def stored_files(run: RunDirectory) -> dict[Path, object]:
    """Return the files of all kept checkpoints and of the export; state.json without times, and the
    manifests without its digest.
    """
    roots = (run.checkpoints, run.export)
    return {
        path.relative_to(root): content_without_times(path)
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def content_without_times(path: Path) -> object:
    from tests.student_trainer.tiny import curve

    if path.name == "state.json":
        state = json.loads(path.read_text())
        return state | {"metrics": curve([state["metrics"]])}
    if path.name == "manifest.json":
        manifest = json.loads(path.read_text())
        manifest["files"].pop("state.json", None)
        return manifest
    return path.read_bytes()
