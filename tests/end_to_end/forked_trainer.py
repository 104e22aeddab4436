"""The real trainer in forked processes: an attempt costs what it does, and no imports."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from clients.job_kinds import processes_of
from clients.run_directory import RunDirectory
from protos import failpoints
from tests.forks import Forks


def attempt(
    run: RunDirectory, number: int, dying: int = 0, failpoint: str = ""
) -> list[int | None]:
    """Exit codes of its processes. `failpoint` is armed in the process `dying`."""
    run.logs(number).mkdir(parents=True, exist_ok=True)
    group = run.logs(number) / "group"
    world = processes_of(run.config())
    return Forks(world, group, _train, run.path, number, dying, failpoint).wait()


def finish(run: RunDirectory, number: int = 1) -> RunDirectory:
    """Train to the end, without a warning."""
    codes = attempt(run, number)
    log = run.log_file(number).read_text()
    assert not any(codes), log
    assert "Warning" not in log
    status = run.read_status()
    assert status is not None
    assert (status.verdict, status.step) == ("succeeded", run.config().max_steps)
    return run


def _train(path: Path, number: int, dying: int, failpoint: str) -> None:
    with RunDirectory(path).log_file(number).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("error")
    if os.environ.get("RANK", "0") == str(dying):
        failpoints.arm(failpoint)
    sys.argv = ["student_trainer", str(path), "--attempt", str(number)]
    from student_trainer.__main__ import main

    code = main()
    if code:
        sys.exit(code)
