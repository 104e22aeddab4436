"""Copies of a run in object storage, from which the run can resume on another machine.

    URL/NAME/   job.json                 the resolved job; another job with this name is refused
                limits.json              the values that the job does not set
                metrics.jsonl            at least the steps up to the newest checkpoint
                checkpoints/step-000050/ the files of a checkpoint
                export/                  the files of the export
                writer                   the process that may write (`ObjectFolder.claim`)

URL is the job's `checkpoint.copy_to`, and NAME is the job's name. A checkpoint or an export is
complete if its manifest.json exists, because the manifest is copied last.

During training, a thread of the main process copies the newest and the best checkpoint. If a newer
checkpoint replaces a checkpoint before the copy starts, the older one is not copied. An attempt
downloads a checkpoint if it is newer than all intact checkpoints in the run directory of the
attempt.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from accelerate import Accelerator
from pydantic import ValidationError

from clients.config.file import named_files, replaced
from clients.config.kinds import AnyJob, AnyTraining, parse_job
from clients.config.tables.teacher import STARTED_KEYS
from clients.preflight.limits import LIMITS_FILE, NO_LIMITS, Limits, read_limits
from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory, replace_file
from clients.runs.identity import first_difference
from clients.runs.metrics_file import read_evaluations
from clients.runs.progress import Cancelled, Progress
from clients.store.objects import ObjectFolder
from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    NotFound,
    Unavailable,
    WrongState,
)
from student_trainer.checkpoints import atomic_directory, checkpoint
from student_trainer.checkpoints.atomic_directory import MANIFEST, read_manifest
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks

log = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds between two checks of the thread
_FIELD = "checkpoint.copy_to"
# Keys that may differ between machines or attempts of the same job.
_IGNORED_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("after", "checkpoint", "labels", "max_steps", "priority"), True),
    **dict.fromkeys(("resources", "teachers", "track"), True),
    "teacher": {"address", *STARTED_KEYS},
    "rollouts": {"address", "gpus", "gpu_memory_share", "patience_seconds"},
    "train": {"processes", "sharding", "cpu_offload", "tokens_per_micro_batch"},
}


class RunCopies:
    """The copies of a run. The methods do nothing if the job has no `checkpoint.copy_to`.

    Every process has an instance. Only the main process reads and writes the storage. The other
    processes only take part in collectives.
    """

    def __init__(
        self,
        config: AnyTraining,
        run: RunDirectory,
        attempt: int,
        accelerator: Accelerator,
        progress: Progress,
    ) -> None:
        """Store the settings. Sends no request to the storage."""
        self._url = _url_of(config)
        self._config = config
        self._run = run
        self._attempt = attempt
        self._accelerator = accelerator
        self._progress = progress
        self._copied: set[int] = set()  # steps of the checkpoints in the storage
        self._unread: set[int] = set()  # steps of an earlier attempt's unverified checkpoints
        self._damaged: set[int] = set()
        self._intact: Path | None = None  # the checkpoint that `fetch` has read or fetched
        self._is_hurried = False
        self._error: Exception | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def fetch(self, from_step: int | None) -> None:
        """Collective. Claim the copies, and fetch the newest intact checkpoint if the run does not
        have it.

        `from_step`: consider only the checkpoint of this step; None: consider all checkpoints.
        Raises InvalidInput if the copies belong to another job, the errors of ObjectFolder, and
        Cancelled if a stop is requested while the storage does not respond.
        """
        if self._url is not None:
            self._progress.say(f"asking the storage {self._url}", 0)
        self._enqueue(lambda: self._fetch(from_step))
        self._wait_for_thread()

    def is_intact(self, path: Path) -> bool:
        """Collective. Return whether the files of the checkpoint match their digests on all ranks.

        If `fetch` has already verified this checkpoint, its files are not read again. See also
        `checkpoint.intact_for_all`.
        """
        is_known_intact = self._url and max_over_ranks(self._accelerator, int(path == self._intact))
        return bool(is_known_intact) or checkpoint.intact_for_all(self._accelerator, path)

    def resume_from(self, step: int) -> None:
        """Collective. Delete the copies of checkpoints after `step`, then start to copy.

        `step`: the step from which the run resumes. The run directory has no later checkpoint.
        Raises the same errors as `fetch`.
        """
        self._enqueue(lambda: self._delete_later(step))
        self._wait_for_thread()
        self.begin()

    def begin(self) -> None:
        """Start to copy the newest and the best checkpoint, in the main process.

        Any thread may call it. Does not wait for the copies. Raises WrongState if another process
        has claimed the copies. Other errors are logged, and the next call tries again.
        """
        if isinstance(self._error, WrongState):
            raise self._error
        if self._work.empty():
            self._enqueue(self._copy_checkpoints)

    def finish(self, step: int, *, hurry: bool = False) -> None:
        """Collective. Wait until the storage has the newest checkpoint, the metrics and the export.

        `step`: the last finished step, for the progress report. `hurry`: send each request only
        once, and log errors instead of raising them. Otherwise raises the same errors as `fetch`.
        """
        if self._url is None:
            return
        self._is_hurried = hurry
        self._progress.say(f"copying to {self._url}", step)
        self._enqueue(self._copy_all)
        self._wait_for_thread(quietly=hurry)

    def close(self) -> None:
        """Wait for the end of the thread. The thread sends each request only once from now on.

        Not collective.
        """
        if self._thread is not None:
            self._is_hurried = True
            self._work.put(None)
            self._thread.join()

    def _enqueue(self, work: Callable[[], None]) -> None:
        if self._url is None or not self._accelerator.is_main_process:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_work, name="copies", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _wait_for_thread(self, *, quietly: bool = False) -> None:
        """Collective. Wait until the thread of the main process has no work; raise its error on all
        ranks.

        `quietly`: do not raise the error. Raises Cancelled instead of Unavailable if a stop is
        requested.
        """
        if self._url is None:
            return
        while max_over_ranks(self._accelerator, int(self._work.unfinished_tasks > 0)):
            time.sleep(_PAUSE)
        try:
            raise_on_all_ranks(self._accelerator, lambda: None if quietly else self._raise_error())
        except Unavailable as error:
            if self._progress.stop_wanted():
                raise Cancelled(str(error)) from error
            raise

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run_work(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
                self._error = None
            except Exception as error:  # noqa: BLE001 (the next save raises it)
                log.warning("%s: %s", self._url, error)
                self._error = _as_distill_error(error)
            finally:
                self._work.task_done()

    @cached_property
    def _folder(self) -> ObjectFolder:
        assert self._url is not None
        is_stop_requested = self._progress.stop_asked
        return ObjectFolder(self._url, stopped=lambda: self._is_hurried or is_stop_requested())

    def _fetch(self, from_step: int | None) -> None:
        limits = read_limits(self._run.path)
        _require_same_job(self._folder, self._config, limits or NO_LIMITS)
        self._folder.claim()
        if limits is not None:
            self._upload(LIMITS_FILE)
        self._upload("job.json")
        local_steps, remote_steps = self._run.checkpoint_steps(), self._complete_steps()
        for step in sorted({*local_steps, *remote_steps}, reverse=True):
            if from_step in (None, step):
                path = self._run.checkpoint(step)
                if atomic_directory.is_intact(path) or (
                    step in remote_steps and self._fetch_checkpoint(step)
                ):
                    self._intact = path
                    break

    def _delete_later(self, step: int) -> None:
        for later_step in [remote_step for remote_step in self._all_steps() if remote_step > step]:
            self._delete(later_step)
        self._copied = set(self._complete_steps())
        self._unread = {*self._run.checkpoint_steps()} - {step}

    def _fetch_checkpoint(self, step: int) -> bool:
        """Fetch the checkpoint of `step`, and the metrics up to `step`.

        Return whether that succeeded. If the copy is damaged, this method deletes the copy and
        returns False.
        """
        path = self._run.checkpoint(step)
        place = f"checkpoints/{path.name}/"
        log.info("fetching the checkpoint of step %d from %s", step, self._url)
        self._progress.say(f"fetching the checkpoint of step {step}", step)
        partial = atomic_directory.begin(path)
        with suppress(FileNotFoundError, ValueError):  # such a copy is not intact
            self._folder.digest(place + MANIFEST, partial / MANIFEST)
            # No other file of the storage is fetched: a key may have any name.
            for name in read_manifest(partial):
                file = partial / name
                file.parent.mkdir(parents=True, exist_ok=True)
                self._folder.digest(place + name, file)
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        if not atomic_directory.is_intact(partial):
            shutil.rmtree(partial)
            log.warning("%s: the copy of step %d is damaged", self._url, step)
            self._delete(step)
            return False
        # Metrics first, as in a save: a checkpoint must not be newer than its metrics.
        self._fetch_metrics(step)
        atomic_directory.publish(path, read_manifest(partial))
        return True

    def _fetch_metrics(self, step: int) -> None:
        """Replace metrics.jsonl by the lines of the stored file up to `step`.

        The number of this attempt replaces the attempt in every line, so that readers of the run
        accept all lines.
        """
        lines_to_step = []
        data = self._folder.read("metrics.jsonl") or b""
        for line in data[: data.rfind(b"\n") + 1].splitlines():  # the last line may be incomplete
            values = json.loads(line)
            if values["step"] <= step:
                lines_to_step.append(json.dumps({**values, "attempt": self._attempt}) + "\n")
        replace_file(self._run.metrics, "".join(lines_to_step))

    def _copy_checkpoints(self) -> None:
        """Copy the newest checkpoint and the best checkpoint of the run, if the storage lacks them.

        Damaged checkpoints are ignored.
        """
        steps = [
            local_step
            for local_step in self._run.checkpoint_steps()
            if local_step not in self._damaged
        ]
        best = best_step(read_evaluations(self._run.metrics), steps)
        for step in dict.fromkeys((*steps[-1:], *([] if best is None else [best]))):
            if step not in self._copied:
                self._copy_checkpoint(step)

    def _copy_checkpoint(self, step: int) -> None:
        path = self._run.checkpoint(step)
        if step in self._unread and not atomic_directory.is_intact(path):
            log.warning("%s is damaged, and is not copied", path)
            self._damaged.add(step)
            return
        try:
            # Metrics before the manifest, which completes the checkpoint: `_fetch_checkpoint`
            # needs both.
            self._upload_directory(f"checkpoints/{path.name}", after="metrics.jsonl")
        except FileNotFoundError:
            if path.exists():
                raise
            return  # deleted before it was opened: a newer or better checkpoint has replaced it
        self._copied.add(step)
        self._delete_old()

    def _copy_all(self) -> None:
        self._copy_checkpoints()
        if self._run.metrics.exists():
            self._upload("metrics.jsonl")
        if self._run.export.is_dir():
            self._upload_directory("export")

    def _upload(self, name: str) -> None:
        with (self._run.path / name).open("rb") as file:
            self._folder.send(name, file)

    def _upload_directory(self, place: str, after: str = "") -> None:
        """Upload a directory of the run.

        `place`: the path of the directory in the run. The order of the uploads is: the files of the
        directory, then the file `after` of the run, then the manifest. All files of the directory
        are opened before the first upload, because the trainer may delete the directory at any
        time.
        """
        path = self._run.path / place
        with ExitStack() as stack:
            names = [*read_manifest(path), MANIFEST]
            files = {name: stack.enter_context((path / name).open("rb")) for name in names}
            manifest = files.pop(MANIFEST)
            self._delete_manifest(place)
            for name, file in files.items():
                self._folder.send(f"{place}/{name}", file)
            if after and (self._run.path / after).exists():
                self._upload(after)
            self._folder.send(f"{place}/{MANIFEST}", manifest)

    def _delete_manifest(self, place: str) -> None:
        """Delete the manifest of a copied directory.

        Readers then treat the directory as incomplete.
        """
        if self._folder.facts(f"{place}/{MANIFEST}"):
            self._folder.delete(f"{place}/{MANIFEST}")

    def _complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in the storage, in ascending order."""
        return sorted(step for step, complete in self._all_steps().items() if complete)

    def _all_steps(self) -> Mapping[int, bool]:
        """Return the steps of all checkpoints in the storage, each with whether it is complete."""
        is_complete: dict[int, bool] = {}
        for name in self._folder.tree():
            match PurePosixPath(name).parts:
                case ("checkpoints", directory, *file_parts) if directory[5:].isdecimal():
                    step = int(directory[5:])
                    is_complete[step] = is_complete.get(step, False) or file_parts == [MANIFEST]
        return is_complete

    def _delete_old(self) -> None:
        """Delete all copied checkpoints except the newest `checkpoint.keep` and the best one."""
        remote_steps = self._complete_steps()
        best_remote_step = best_step(read_evaluations(self._run.metrics), remote_steps)
        for step in self._all_steps():
            if step not in (*remote_steps[-self._config.checkpoint.keep :], best_remote_step):
                self._delete(step)

    def _delete(self, step: int) -> None:
        place = f"checkpoints/{self._run.checkpoint(step).name}"
        self._delete_manifest(place)
        self._folder.delete_folder(place)
        self._copied.discard(step)


def copied_limits(config: AnyTraining, progress: Progress) -> Limits | None:
    """Return the limits that are stored with the copies of the run.

    Returns None if `checkpoint.copy_to` has no copies of the job. Raises the same errors as
    `RunCopies.fetch`. Not collective.
    """
    url = _url_of(config)
    assert url is not None
    progress.say(f"asking the storage {url}", 0)
    try:
        folder = ObjectFolder(url, stopped=progress.stop_asked)
        text = folder.read(LIMITS_FILE)
        limits = NO_LIMITS if text is None else Limits(**json.loads(text))
        return limits if _require_same_job(folder, config, limits) else None
    except (DistillError, OSError) as error:
        if isinstance(error, Unavailable) and progress.stop_asked():
            raise Cancelled(str(error)) from error
        raise _as_distill_error(error) from error


def _url_of(config: AnyTraining) -> str | None:
    url = config.checkpoint.copy_to
    return url and f"{url}/{quote(config.name, safe=' =,')}"


def _require_same_job(folder: ObjectFolder, config: AnyTraining, limits: Limits) -> bool:
    """Return whether `folder` has copies of the job.

    `limits`: the limits of the job. They are applied to the stored job and to `config` before both
    are compared. Raises InvalidInput if the stored job has other values, and WrongState if this
    version cannot read the stored job.
    """
    if (job_text := folder.read("job.json")) is None:
        return False
    try:
        stored_values = _comparable_values(limits.apply(parse_job(job_text)))
    except ValidationError as error:
        raise WrongState(
            f"{folder.name} has copies of another job, and this version of distill-service"
            f" cannot read their job.json",
            hint="set checkpoint.copy_to to another URL, or use the version that wrote the copies",
        ) from error
    own_values = _comparable_values(limits.apply(config))
    if None in (stored_values.get("epochs"), own_values.get("epochs")):  # `max_steps` is used
        own_values = {**own_values, "epochs": stored_values.get("epochs")}
    if difference := first_difference(stored_values, own_values):
        key, stored_value, own_value = difference
        raise InvalidInput(
            f"{folder.name} has the copies of a job with another {key}:"
            f" {stored_value!r}, not {own_value!r}",
            hint="change checkpoint.copy_to or the name of the job, or use the same values",
        )
    return True


def _comparable_values(config: AnyJob) -> Mapping[str, Any]:
    """Return the values of a job that must be the same in all attempts.

    Paths are replaced by file names, because a file may be in another directory on another machine.
    """
    for key, name in named_files(config):
        config = replaced(config, key, Path(name).name)
    return config.model_dump(exclude=dict(_IGNORED_KEYS))


def _as_distill_error(error: Exception) -> Exception:
    """Convert an OSError into a DistillError, which can be raised on all ranks.

    FileNotFoundError becomes NotFound, PermissionError becomes Forbidden, and any other OSError
    becomes Unavailable. The field of the error is `checkpoint.copy_to`, unless a DistillError
    already has a field. Other exceptions are returned unchanged.
    """
    if isinstance(error, DistillError):
        error.field = error.field or _FIELD
        return error
    if isinstance(error, OSError):
        kind: type[DistillError] = Unavailable
        if isinstance(error, FileNotFoundError):
            kind = NotFound
        elif isinstance(error, PermissionError):
            kind = Forbidden
        place = f"{error.filename}: " if error.filename else ""
        return kind(f"{place}{error.strerror or error}", field=_FIELD)
    return error
