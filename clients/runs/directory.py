"""runs/<id>/: the only thing that a trainer shares with whoever started it.

    job.toml        the job file as its author wrote it (when there was one)
    job.json        the resolved job
    status.json     the trainer's word: phase, step, and at the end the verdict
    control.json    the owner's word: stop, please
    environment.json, code.diff  what the newest attempt runs on
    metrics.jsonl   one object a step; after a resume it holds no step twice
    logs/attempt-N/ rank-0.log, and the files of the attempt's shim
    checkpoints/step-000050/   samples/   tb/
    export/         a Hugging Face directory; in it adapter/ and anchor/, if there are any
    store/          the rows of a capture

JSON files are replaced as a whole: a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from clients.config.kinds import AnyJob, parse_job
from protos.errors import NotFound, WrongState

Verdict = Literal["running", "succeeded", "failed", "cancelled"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Status:
    """What the trainer last said of itself.

    `verdict` is final unless it is "running"; a trainer that is gone with that verdict died.
    """

    attempt: int
    verdict: Verdict
    phase: str = ""
    step: int = 0
    max_steps: int = 0
    reason: str = ""
    # Name of the DistillError behind a failure ("Unavailable"), for exit codes.
    error: str = ""


@dataclass(frozen=True)
class Control:
    """The owner's wish: stop after a last checkpoint, or at once."""

    stop: Literal["", "checkpoint", "now"] = ""


# What a report wants besides the curves: small, and whole at any time.
NOTES = ("environment.json", "samples")
_STATUS, _CONTROL = TypeAdapter(Status), TypeAdapter(Control)


class RunDirectory:
    """Paths and the small files of one run. `create` makes one, the constructor opens one."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: AnyJob,
        config_text: str = "",
        suffix: str = ".toml",
        *,
        durable: bool = True,
    ) -> RunDirectory:
        """Make the directory and its job files; raises FileExistsError if it exists. `durable`:
        they are to survive a power cut from now on.
        """
        run = cls(path)
        run.path.mkdir(parents=True, mode=0o700)
        if config_text:
            (run.path / f"job{suffix}").write_text(config_text)
        resolved = config.model_dump_json(indent=2) + "\n"
        if durable:
            replace_file(run.job_json, resolved)
        else:
            run.job_json.write_text(resolved)
        return run

    @property
    def job_json(self) -> Path:
        return self.path / "job.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> tuple[int, ...]:
        """Of the checkpoints that are there, in order; unverified."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def code_diff(self) -> Path:
        return self.path / "code.diff"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def log_file(self, attempt: int) -> Path:
        return self.logs(attempt) / "rank-0.log"

    def config(self) -> AnyJob:
        """The resolved job; raises NotFound where there is none, WrongState where it is one of
        another version.
        """
        try:
            return parse_job(self.job_json.read_text())
        except FileNotFoundError as error:
            raise NotFound(
                f"{self.path} is not a run directory", hint="it has no job.json"
            ) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or self.job_json.name
            raise WrongState(
                f"this version does not take the job of {self.path}: {where}: {first['msg']}",
                hint="use the version that made it",
            ) from error

    def read_status(self) -> Status | None:
        """None where there is none, or nonsense."""
        return _read_as(_STATUS, self.path / "status.json")

    def write_status(self, status: Status) -> None:
        replace_file(self.path / "status.json", json.dumps(asdict(status)) + "\n")

    def read_control(self) -> Control:
        """No wish where there is none, or nonsense."""
        return _read_as(_CONTROL, self.path / "control.json") or Control()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every trainer but this one out; raises WrongState when another is at work here."""
        with (self.path / ".trainer.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise WrongState(
                    f"another trainer is at work in {self.path}", hint="wait for it, or stop it"
                ) from error
            yield

    def write_control(self, control: Control) -> None:
        replace_file(self.path / "control.json", json.dumps(asdict(control)) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_as(kind: TypeAdapter[_T], path: Path) -> _T | None:
    """None also for nonsense of a broken disk: whoever follows the run goes on without it."""
    try:
        return kind.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError):
        return None
