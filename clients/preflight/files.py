"""What can be known to be wrong with a job on the machine that is to run it, before it runs.

Imports no torch: an answer takes milliseconds.

A server asks before it queues a job, and the job's program again when it starts: much may have
changed meanwhile. `teacher_checks.py` has what the teachers must be asked for.
"""

from __future__ import annotations

from pathlib import Path

from clients.config.common import StudentConfig, TrainingJob
from clients.config.file import named_files
from clients.config.kinds import AnyJob, AnyTraining
from clients.config.offline import OfflineJob
from clients.data.records import FILE_SUFFIXES
from clients.preflight.disk import check_space
from clients.preflight.packages import check_packages
from clients.preflight.trackers import check_trackers
from clients.store.captured_store import captured_store_of
from protos.errors import InvalidInput

RELATIVE = "relative paths start at the current directory"


def check_here(config: AnyJob, run: Path, *, hint: str = RELATIVE, packages: bool = True) -> None:
    """Refuse a job whose files, trackers or disk are not there. Raises a DistillError.

    `run`: its directory, or the one that its directory will be made in; `hint`: the remedy for a
    file that is missing; `packages`: whether the job's program runs with this Python, so that
    what it imports must be installed here (not so on a Ray cluster).
    """
    if packages:
        check_packages(config)
    check_files(config, hint)
    if not isinstance(config, TrainingJob):
        return
    check_student(config.student)
    check_processes(config)
    check_trackers(config.track)
    check_space(config, run)
    if isinstance(config, OfflineJob):
        captured_store_of(config)


def check_files(config: AnyJob, hint: str = RELATIVE) -> None:
    """What is a path by its looks must exist; the rest may be hub ids. Raises InvalidInput."""
    for key, name in named_files(config):
        file = name.endswith((*FILE_SUFFIXES, ".py"))
        # A hub id has one slash at most, and no NUL, at which Python's own functions would fail.
        local = file or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
        local = local or "\0" in name
        try:
            there = Path(name).is_file() if file else Path(name).exists()
        except OSError as error:  # too long a name, or a directory that is not ours
            what = f"cannot look for {name}: {error.strerror}"
            raise InvalidInput(what, field=key, hint=hint) from error
        if local and not there:
            raise InvalidInput(f"no such file: {name}", field=key, hint=hint)


def check_student(student: StudentConfig) -> None:
    """Refuse a student directory without a model in it."""
    path = Path(student.model)
    if path.is_dir() and not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        missing = "*.safetensors" if (path / "config.json").is_file() else "config.json"
        raise InvalidInput(
            f"no {missing} in {path}",
            field="student.model",
            hint="give a Hugging Face directory with config, tokenizer and safetensors",
        )


def check_processes(config: AnyTraining) -> None:
    """Refuse more processes than there is work for: one without any would stop the others."""
    for field, work in (
        ("train.prompts_per_step", config.sequences_per_step),
        ("eval.prompts", config.eval.prompts),
    ):
        if work < config.train.processes:
            raise InvalidInput(
                f"{work} sequences cannot be shared by {config.train.processes} processes",
                field=field,
                hint="raise it, or lower train.processes",
            )
