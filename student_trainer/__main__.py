"""python -m student_trainer RUN_DIR --attempt N [--from-step S]: one attempt at a job.

Imports in two stages: what is cheap to check is checked before torch is loaded.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from clients.run_directory import RunDirectory
from clients.teacher_client import TeacherClient
from protos.errors import DistillError, ExitCode
from student_trainer.preflight import (
    check_data,
    check_hub,
    check_processes,
    check_student,
    check_teacher,
)
from student_trainer.progress import Progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="student_trainer", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--from-step", type=int, default=None)
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
    config = run.config()
    progress = Progress(
        run,
        attempt=options.attempt,
        max_steps=config.max_steps,
        main=os.environ.get("RANK", "0") == "0",
        terminated=lambda: terminated,
    )
    progress.say("preflight", 0)
    try:
        check_data(config.data)
        check_student(config.student)
        check_processes(config)
        check_hub(config)
        patience = config.teacher.patience_seconds
        with TeacherClient(config.teacher.address, patience_seconds=patience) as client:
            info = client.info()
            check_teacher(info, config)
            from student_trainer.assembly import assemble

            trainer = assemble(
                config, run, client, info, progress, options.attempt, options.from_step
            )
            verdict = trainer.train()
    except DistillError as error:
        progress.end("failed", str(error), type(error).__name__)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        logging.exception("the trainer failed")
        progress.end("failed", f"{type(error).__name__}: {error}")
        return ExitCode.JOB_FAILED
    progress.end("succeeded" if verdict == "succeeded" else "cancelled")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
