"""Run one attempt of a capture job: python -m teacher_service.capture RUN_DIR --attempt N.

The program follows the protocol of job programs, described in `clients/runs/launch.py`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress, run_to_verdict
from protos.errors import WrongState


def main() -> int:
    """Run the attempt and return the exit code; command-line errors exit with code 2."""
    parser = argparse.ArgumentParser(prog="teacher_service.capture", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    terminated = False

    def on_sigterm(*_: object) -> None:
        nonlocal terminated
        terminated = True

    signal.signal(signal.SIGTERM, on_sigterm)
    run = RunDirectory(options.run)
    job = run.config()
    assert isinstance(job, CaptureJob), "launch.py starts the program of each kind"
    progress = Progress(
        run, attempt=options.attempt, max_steps=0, main=True, terminated=lambda: terminated
    )
    try:
        with run.held():
            # Imported late: the import takes seconds, and the checks above do not need it.
            from teacher_service.capture.program import capture

            return run_to_verdict(progress, lambda: capture(run, job, progress, options.attempt))
    except WrongState as error:  # the status file belongs to the other process
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
