"""The command lines of a job's programs, for `distill run`, the server and the trainer.

The method selects the program: a capture runs `teacher_service.capture`, an evaluation runs
`student_trainer.exam.job`, and every other method runs `student_trainer`. The program reads
job.json, writes its progress to status.json, and reads control.json before every step. SIGTERM has
the same effect as `stop = "checkpoint"`.

The exit code is 0 if the verdict is "succeeded" or "cancelled". Otherwise it is the ExitCode of the
error in the status (1 under `accelerate launch`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from clients.config.tables.common import StudentConfig
from clients.config.tables.rollouts import RolloutsConfig
from clients.config.tables.teacher import TeacherLink
from clients.runs.directory import RunDirectory

# The event under which a teacher that loads logs the stage of its start, as the field `stage`.
PROGRESS = "loading"


def trainer_command(
    run: Path, *, attempt: int, processes: int, from_step: int | None = None
) -> list[str]:
    """Return the command line of the program of a job, for one attempt.

    `processes`: number of processes that train. The program resumes from the checkpoint of
    `from_step`. If `from_step` is None, the program resumes from the newest undamaged checkpoint,
    or starts from the beginning if there is none.
    """
    program = RunDirectory(run).config().program
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


def teacher_command(teacher: TeacherLink, port: int, token_file: Path | None = None) -> list[str]:
    """Return the command line of the teacher that runs the model `teacher.model`.

    - `port`: port of the teacher on the loopback address; 0: any free port
    - `token_file`: file of the tokens that the teacher accepts; None: no tokens
    """
    assert teacher.model is not None
    command = [sys.executable, "-P", "-m", "teacher_service", "--port", str(port)]
    command += ["--engine", teacher.engine, "--dtype", teacher.dtype]
    # With "=": a text that starts with "-" is no option.
    command += [f"--model={teacher.model}", "--max-batch-tokens", str(teacher.max_batch_tokens)]
    if teacher.device != "auto":
        command.append(f"--device={teacher.device}")
    if teacher.batch_invariant:
        command.append("--batch-invariant")
    if teacher.engine == "vllm":
        command += ["--tensor-parallel-size", str(max(1, teacher.gpus_of_model))]
    if token_file is not None:
        command += ["--token-file", str(token_file)]
    return command


def rollouts_command(student: StudentConfig, rollouts: RolloutsConfig) -> list[str]:
    """Return the command line of a job's rollout service, without its port and threads."""
    command = [sys.executable, "-P", "-m", "student_trainer.rollout_service"]
    command += ["--model", student.model, "--engine", rollouts.engine, "--dtype", student.dtype]
    if student.revision is not None:
        command += ["--revision", student.revision]
    if student.adapter_rank:
        command += ["--lora-rank", str(student.adapter_rank)]
    if rollouts.engine == "vllm":
        command += ["--tensor-parallel-size", str(rollouts.tensor_parallel_size)]
        command += ["--gpu-memory-share", str(rollouts.memory_share)]
    return command
