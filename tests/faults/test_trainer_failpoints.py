"""The trainer dies at failpoints within a step: the resumed run is bit-identical."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.conftest import material, once, teacher, undisturbed
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

__all__ = ["material", "once", "teacher", "undisturbed"]

SPECS = [
    "gradients-ready:kill:6",
    "step-done:kill:3",
    "metrics-written:kill:4",
    # In attempt 4, step 20 has a checkpoint, and neither an evaluation nor a line.
    "checkpoint-renamed:kill:4",
]


@pytest.mark.slow
def test_deaths_within_a_step(
    material: Material, teacher: str, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import curve, job

    run = new_run(tmp_path / "run", job(material, teacher))
    for attempt, spec in enumerate(SPECS, 1):
        with trainer(run, attempt, failpoint=spec) as process:
            assert process.wait() == -signal.SIGKILL, process.log
    finish(run, len(SPECS) + 1)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)
