"""Run one attempt of a capture job: python -m teacher_service.capture RUN_DIR --attempt N."""

from __future__ import annotations

import sys

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import Progress, run_program


def main() -> int:
    """Run the attempt and return the exit code; command-line errors exit with code 2."""
    return run_program(CaptureJob, "teacher_service.capture", __doc__, _capture)


def _capture(run: RunDirectory, job: CaptureJob, progress: Progress) -> Verdict:
    # Imported late: the import takes seconds, and the checks before do not need it.
    from teacher_service.capture.program import capture

    return capture(run, job, progress, progress.attempt)


if __name__ == "__main__":
    sys.exit(main())
