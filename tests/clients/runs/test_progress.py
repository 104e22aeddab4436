"""The end of an attempt where its files cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clients.config.capture import CaptureJob
from clients.config.kinds import AnyJob
from clients.config.sft import SFTJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress, Verdict, run_to_verdict
from protos.errors import ExitCode, Unavailable


def test_an_outage_has_its_exit_code_where_the_log_is_on_the_full_disk(tmp_path: Path) -> None:
    """The server decides by the exit code: with 1 the job would lose a retry instead of waiting."""
    run = RunDirectory(tmp_path)
    progress = Progress(run, attempt=1, max_steps=1, main=True, terminated=lambda: False)

    def attempt() -> Verdict:
        raise Unavailable("no space left on device", field="disk", hint="-")

    with (
        open("/dev/full", "wb", buffering=0) as full_disk,
        io.TextIOWrapper(full_disk, write_through=True) as log,
        contextlib.redirect_stderr(log),
    ):
        assert run_to_verdict(progress, attempt) == ExitCode.UNREACHABLE


def test_a_file_on_a_disk_that_became_read_only_is_an_outage(tmp_path: Path) -> None:
    """As ext4 after an error: the job waits for the disk, and uses no retry."""
    run = RunDirectory(tmp_path)
    progress = Progress(run, attempt=1, max_steps=1, main=True, terminated=lambda: False)

    def attempt() -> Verdict:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "metrics.jsonl"))

    assert run_to_verdict(progress, attempt) == ExitCode.UNREACHABLE


@pytest.mark.parametrize("program", ["student_trainer", "teacher_service.capture"])
def test_a_run_directory_that_cannot_be_written_is_one_sentence(
    program: str, tmp_path: Path
) -> None:
    """As where another user has made the lock; root may write everything, but not a directory."""
    data = {"path": "x.jsonl", "text_column": "text"}
    config: AnyJob = CaptureJob.model_validate(
        {"data": data, "method": {"type": "capture"}, "teacher": {"model": "x"}}
    )
    if program == "student_trainer":
        config = SFTJob.model_validate(
            {
                "student": {"model": "x"},
                "data": {"path": "x.jsonl"},
                "method": {"type": "sft"},
                "max_steps": 1,
            }
        )
    run = RunDirectory.create(tmp_path / "run", config)
    (run.path / ".trainer.lock").mkdir()
    command = [sys.executable, "-m", program, str(run.path), "--attempt", "1"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == ExitCode.USAGE, process.stderr
    assert process.stderr == (
        f"error: run directory: is a directory: {run.path}/.trainer.lock;"
        " the user that runs the job must be able to write there\n"
    )
