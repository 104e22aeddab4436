"""A run directory whose disk is full: the fault is reported as one of the disk, and the run
resumes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.verdict import DeadAttempt, verdict_of
from distill_server.runners.interface import Exited
from protos.errors import ExitCode
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import new_run, weights
from tests.small_disk import small_disk

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


def fill_disk(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_waited_for(
    material: Material, teacher: str, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import job

    with small_disk(tmp_path / "disk", "8m") as disk:
        run = new_run(disk / "run", job(material, teacher))
        fill_and_free(run, disk / "ballast")
        finish(run, 2)
        assert weights(run) == weights(undisturbed)


def fill_and_free(run: RunDirectory, ballast: Path) -> None:
    """Run the first attempt: its disk is full after some steps, and has space again at its end."""
    with trainer(run) as process:
        process.wait_for_step(5)
        fill_disk(ballast)
        assert process.wait() == ExitCode.UNREACHABLE, process.log
        assert "error: disk: no space left on device" in process.log
    for status in (run.read_status(), None):  # whether or not the status could be written
        verdict = verdict_of(JobState.RUNNING, 5, status, Exited(ExitCode.UNREACHABLE))
        assert isinstance(verdict, DeadAttempt)
        assert (verdict.blameless, verdict.waits_for) == (True, "disk")
    ballast.unlink()
