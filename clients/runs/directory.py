"""The run directory runs/<id>/, the only state that a job's program shares with its owner.

The owner is the server or the command that started the program.

    job.toml        the job file as written by its author, if there was a file
    job.json        the resolved job
    status.json     written by the program: phase, step, and finally the verdict
    control.json    written by the owner: a request to stop
    server          empty; present if the owner is the job server of the parent directory
    teacher.json    written by the owner: the address of the teacher that it started for the job
    environment.json, code.diff  software, hardware and code of the newest attempt
    limits.json     limits and columns that the job does not set; a resumed attempt keeps them
    preview.json    the training data, token by token; written when training begins
    metrics.jsonl   one JSON object per step; no step occurs twice, even after a resume
    logs/attempt-N/ rank-0.log, and the files of the attempt's shim
    checkpoints/step-000050/   samples/   tb/
    export/         a Hugging Face directory; contains adapter/ and anchor/ if the job has them
    store/          the rows of a capture
    eval/           the answers of an evaluation, and result.json

JSON files are replaced atomically: a reader never sees a partial file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, Field, TypeAdapter, ValidationError

from clients.config.evaluation import RESULTS
from clients.config.kinds import AnyJob, parse_job
from clients.data.outside import open_regular
from clients.runs.file_system import fsync_directory, lock_file
from protos.errors import CATEGORIES, NotFound, WrongState

Verdict = Literal["running", "succeeded", "failed", "cancelled"]

_T = TypeVar("_T")
# When a launcher is killed, its ranks end later, on a busy machine by seconds.
_LOCK_SECONDS = 10
# A trainer that an earlier version has started writes the class of the error, as `error`.
_CODES = {category.__name__: category.code.value for category in CATEGORIES}
_ErrorCode = Annotated[
    str,
    AfterValidator(lambda name: _CODES.get(name, name)),
    Field(validation_alias=AliasChoices("code", "error")),
]


@dataclass(frozen=True)
class Status:
    """The newest status that a job's program has written.

    A `verdict` other than "running" is final. If the program has exited and the verdict is still
    "running", the program crashed.
    """

    attempt: int
    verdict: Verdict
    phase: str = ""
    step: int = 0
    max_steps: int = 0
    reason: str = ""
    # ErrorCode and field of the DistillError that caused a failure; "" for other failures.
    code: _ErrorCode = ""
    field: str = ""


@dataclass(frozen=True)
class Control:
    """A request of the owner to the program.

    - `stop`: "checkpoint" means to stop after a checkpoint, "now" to stop immediately; "": no
      request
    - `cancelled_attempt`: number of the attempt that a user has cancelled; 0 if the owner itself
      requests the stop. The file stays after the attempt. A number of an earlier attempt does not
      cancel a later attempt.
    """

    stop: Literal["", "checkpoint", "now"] = ""
    cancelled_attempt: int = 0


# In the parent directory of the runs of a job server.
SERVER_RECORD = ".server.json"
# Files and directories that a report needs besides the metrics. They are small, and readable while
# the job runs.
NOTES = ("environment.json", "preview.json", "samples")
_STATUS, _CONTROL = TypeAdapter(Status), TypeAdapter(Control)


class RunDirectory:
    """The paths in a run directory, and the content of its small files.

    `create` creates a new directory. The constructor opens an existing directory without checks.
    """

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
        """Create the directory (mode 0700) and its job files.

        - `config_text`: text of the job file; "" if there is none
        - `suffix`: suffix of the job file's name
        - `durable`: job.json must survive a power failure

        Raises FileExistsError if `path` exists.
        """
        run = cls(path)
        run.path.mkdir(parents=True, mode=0o700)
        if config_text:
            (run.path / f"job{suffix}").write_text(config_text, encoding="utf-8")
        resolved = config.model_dump_json(indent=2) + "\n"
        if durable:
            replace_file(run.job_json, resolved)
        else:
            run.job_json.write_text(resolved, encoding="utf-8")
        return run

    @property
    def job_json(self) -> Path:
        """Path of the resolved job."""
        return self.path / "job.json"

    @property
    def server_mark(self) -> Path:
        """Path of an empty file, which exists if the run is a job of a job server."""
        return self.path / "server"

    @property
    def metrics(self) -> Path:
        """Path of the metrics; `metrics_file.py` defines the format."""
        return self.path / "metrics.jsonl"

    @property
    def preview(self) -> Path:
        """Path of the preview of the data; `clients/data/preview.py` defines the format."""
        return self.path / "preview.json"

    @property
    def checkpoints(self) -> Path:
        """Parent directory of all checkpoints. It may not exist yet."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step. It may not exist."""
        return self.checkpoints / f"step-{step:06d}"

    def checkpoint_steps(self) -> tuple[int, ...]:
        """Return the steps of the existing checkpoints in ascending order.

        Does not check their files.
        """
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    @property
    def samples(self) -> Path:
        """Directory of the sampled answers, with a file step-N.jsonl for each evaluation."""
        return self.path / "samples"

    @property
    def export(self) -> Path:
        """Directory of the exported model. It exists after a training job has succeeded."""
        return self.path / "export"

    @property
    def weights(self) -> Path:
        """Directory of the weights for rollout engines.

        A trainer may write the weights to a directory in memory instead.
        """
        return self.path / "weights"

    @property
    def store(self) -> Path:
        """Default directory of a capture's rows. The job may name another directory."""
        return self.path / "store"

    @property
    def token_logprobs(self) -> Path:
        """Directory of the log-probs of the held-out tokens, which each evaluation writes."""
        return self.path / "token_logprobs"

    @property
    def evaluation(self) -> Path:
        """Directory of the answers and the results of an evaluation."""
        return self.path / RESULTS

    @property
    def code_diff(self) -> Path:
        """Path of a patch: the uncommitted changes in the code that the newest attempt ran."""
        return self.path / "code.diff"

    @property
    def tensorboard(self) -> Path:
        """Directory of the TensorBoard files."""
        return self.path / "tb"

    def logs(self, attempt: int) -> Path:
        """Return the log directory of an attempt (from 1). It may not exist."""
        return self.path / "logs" / f"attempt-{attempt}"

    def log_file(self, attempt: int) -> Path:
        """Return the path of the log of an attempt's main process (rank 0).

        The file may not exist.
        """
        return self.logs(attempt) / "rank-0.log"

    def config(self) -> AnyJob:
        """Read the resolved job from job.json.

        Raises NotFound if there is no job.json, WrongState if this version cannot read it, and
        OSError if it is not a regular file.
        """
        try:
            with open_regular(self.job_json) as file:
                return parse_job(file.read())
        except FileNotFoundError as error:
            raise NotFound(
                f"{self.path} is not a run directory", hint="a run directory has a job.json"
            ) from error
        except ValidationError as error:
            first_problem = error.errors(include_url=False)[0]
            location = ".".join(map(str, first_problem["loc"])) or self.job_json.name
            raise WrongState(
                f"this version cannot read the job of {self.path}: {location}:"
                f" {first_problem['msg']}",
                hint="use the version that made the run directory",
            ) from error

    def read_status(self) -> Status | None:
        """Read status.json; return None if it is missing or invalid."""
        return _read_as(_STATUS, self.path / "status.json")

    def write_status(self, status: Status) -> None:
        """Replace status.json atomically, without a check of the fence.

        The program of a job uses `Progress` instead, which checks the fence.
        """
        replace_file(self.path / "status.json", json.dumps(asdict(status)) + "\n")

    def read_control(self) -> Control:
        """Read control.json.

        If the file is missing or invalid, return a Control without a request.
        """
        return _read_as(_CONTROL, self.path / "control.json") or Control()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the run directory during the block: only one program may run in it.

        If another process holds the lock, waits _LOCK_SECONDS for it, because a killed program
        needs time to exit. Raises WrongState if another process on this machine still holds the
        lock then.
        """
        with (self.path / ".trainer.lock").open("a", encoding="utf-8") as lock:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(lock, self.path / ".trainer.lock"):
                if time.monotonic() > deadline:
                    raise WrongState(
                        f"another program is running in {self.path}",
                        hint="wait for that program, or stop it",
                    )
                time.sleep(0.1)
            yield

    def is_held(self) -> bool:
        """Return whether a program holds the lock of `held` now."""
        path = self.path / ".trainer.lock"
        with path.open("a", encoding="utf-8") as lock:
            return not _try_lock(lock, path)

    def write_control(self, control: Control) -> None:
        """Replace control.json atomically. The program reads control.json before every step."""
        replace_file(self.path / "control.json", json.dumps(asdict(control)) + "\n")


def _try_lock(file: IO[str], path: Path) -> bool:
    try:
        lock_file(file, path, wait=False)
    except BlockingIOError:
        return False
    return True


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """Write `path` atomically and durably. `text`: the content, or an iterable of its parts.

    After a crash or a power failure, the file has either the old or the new content.
    """
    # Threads of one server may write the same file at the same time.
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def _read_as(kind: TypeAdapter[_T], path: Path) -> _T | None:
    """Parse a JSON file. Return None if it is missing, invalid or not a regular file.

    A broken disk can make a file invalid. This must not stop the process that monitors the run.
    """
    try:
        with open_regular(path) as file:
            return kind.validate_json(file.read(), strict=True)
    except (OSError, ValueError):
        return None
