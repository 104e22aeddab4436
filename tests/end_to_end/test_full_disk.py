"""A run directory whose disk is full: told as a fault of the disk, and made up for later."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.verdict import Died, verdict_of
from distill_server.runners.interface import Exited
from protos.errors import ExitCode
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

DISK = "8m"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
def test_a_full_disk_is_waited_for(
    material: Material, teacher: str, undisturbed: RunDirectory, small_disk: Path
) -> None:
    from tests.student_trainer.tiny import job

    run = new_run(small_disk / "run", job(material, teacher))
    ballast = small_disk / "ballast"
    with trainer(run) as process:
        process.wait_for_step(5)
        fill(ballast)
        assert process.wait() == ExitCode.UNREACHABLE, process.log
        assert "error: disk: no space left on device" in process.log
    for status in (run.read_status(), None):  # whether it could be written or not
        verdict = verdict_of(JobState.RUNNING, 5, status, Exited(ExitCode.UNREACHABLE))
        assert isinstance(verdict, Died)
        assert (verdict.blameless, verdict.waits_for) == (True, "disk")
    ballast.unlink()
    finish(run, 2)
    assert weights(run) == weights(undisturbed)
