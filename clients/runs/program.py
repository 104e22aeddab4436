"""The command line of a job's program that has one process: `PROGRAM RUN_DIR --attempt N`.

The program follows the protocol of job programs, described in `clients/runs/launch.py`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from clients.config.kinds import AnyJob
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import Progress, run_to_verdict
from protos.errors import WrongState


def prepare() -> Callable[[], bool]:
    """Start logging; return a function that tells whether a SIGTERM, a wish to stop, has come."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    terminated = False

    def on_sigterm(*_: object) -> None:
        nonlocal terminated
        terminated = True

    signal.signal(signal.SIGTERM, on_sigterm)
    return lambda: terminated


def run_program(
    name: str, description: str | None, work: Callable[[RunDirectory, AnyJob, Progress], Verdict]
) -> int:
    """Run one attempt and return the exit code; command-line errors exit with code 2.

    `work` is called while this process holds the lock of the run directory. SIGTERM sets the wish
    to stop that its progress returns.
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    terminated = prepare()
    run = RunDirectory(options.run)
    job = run.config()
    progress = Progress(run, attempt=options.attempt, max_steps=0, main=True, terminated=terminated)
    try:
        with run.held():
            return run_to_verdict(progress, lambda: work(run, job, progress))
    except WrongState as error:  # the status file belongs to the other process
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
