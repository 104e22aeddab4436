"""The command line that runs a job's program on a run directory, for `distill run` and the server.

The program of a capture is `teacher_service.capture`, of all other methods `student_trainer`. The
program reads job.json, writes its progress to status.json, and reads control.json before every
step. SIGTERM has the same effect as `stop = "checkpoint"`. The exit code is 0 if the verdict is
"succeeded" or "cancelled"; otherwise it is the ExitCode of the error that the status names (1 under
`accelerate launch`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory


def trainer_command(
    run: Path, *, attempt: int, processes: int, from_step: int | None = None
) -> list[str]:
    """Return the command line of one attempt.

    The program resumes from the checkpoint of `from_step`, or from the newest good checkpoint if
    `from_step` is None; it starts from the beginning if there is no checkpoint.
    """
    captures = isinstance(RunDirectory(run).config(), CaptureJob)
    program = "teacher_service.capture" if captures else "student_trainer"
    # -P: Python imports nothing from the working directory, which may belong to anybody.
    trainer = [sys.executable, "-P", "-m", program, str(run), "--attempt", str(attempt)]
    if from_step is not None:
        trainer += ["--from-step", str(from_step)]
    if processes == 1:
        return trainer
    launcher = [sys.executable, "-P", "-m", "accelerate.commands.launch"]
    launcher += ["--num_processes", str(processes)]
    # Without --multi_gpu, accelerate silently starts one process on a machine with fewer than two
    # GPUs. With it, several processes also run on CPUs.
    launcher.append("--multi_gpu")
    # Port 0 means any free port, so that two jobs on one machine do not collide.
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # --no_python: the launcher itself would start the ranks without -P.
    return [*launcher, "--main_process_port", "0", "--no_python", *trainer]
