"""The command that runs a job's program on a run directory, for `distill run` and the server.

A capture's program is of the teacher, any other's is the trainer. It reads job.json, tells its
progress in status.json, and looks at control.json before every step. SIGTERM means the same as
`stop = "checkpoint"`. It exits 0 when its verdict is "succeeded" or "cancelled", otherwise with the
ExitCode of the fault that its status names (under `accelerate launch`: with 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory


def trainer_command(
    run: Path, *, attempt: int, processes: int, from_step: int | None = None
) -> list[str]:
    """One attempt's arguments; it resumes from the newest good checkpoint, or from `from_step`."""
    captures = isinstance(RunDirectory(run).config(), CaptureJob)
    program = "teacher_service.capture" if captures else "student_trainer"
    trainer = [program, str(run), "--attempt", str(attempt)]
    if from_step is not None:
        trainer += ["--from-step", str(from_step)]
    if processes == 1:
        return [sys.executable, "-m", *trainer]
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    # Without it, a machine with less than two GPUs silently gets one process; CPUs do as well.
    launcher.append("--multi_gpu")
    # Port 0: a free one, so that two jobs on one machine do not meet.
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [sys.executable, *launcher, "--main_process_port", "0", "-m", *trainer]
