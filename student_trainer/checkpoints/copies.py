"""Copies of a run in an object storage, from which it goes on on another machine.

    URL/NAME/   job.json                 the resolved job; another job with this name is refused
                metrics.jsonl            at least the steps up to the newest checkpoint
                checkpoints/step-000050/ as in the run directory; complete once it has manifest.json
                export/                  the same
                writer                   the process that may write (`ObjectFolder.claim`)

URL is the job's `checkpoint.copy_to`, and NAME its name. A thread of the main process copies the
newest checkpoint and the best one while training goes on: of those that are published in the
meantime, the others are not copied. An attempt that finds a newer checkpoint there than in its run
directory fetches it.
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
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from accelerate import Accelerator
from pydantic import ValidationError

from clients.config.file import named_files, replaced
from clients.config.kinds import AnyJob, AnyTraining, parse_job
from clients.runs.best_step import best_step
from clients.runs.difference import first_difference
from clients.runs.directory import RunDirectory, replace_file
from clients.runs.metrics_follower import read_points
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
from student_trainer.parallel.collectives import largest, raise_on_all_ranks

log = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds between two looks at the thread
_MANIFEST = "manifest.json"
_FIELD = "checkpoint.copy_to"
# What may differ on another machine, or in another attempt, of the same job.
_FREE: Mapping[str, Any] = {
    **dict.fromkeys(("after", "checkpoint", "labels", "max_steps", "priority"), True),
    **dict.fromkeys(("resources", "teachers", "track"), True),
    "teacher": {"address"},
    "rollouts": {"address", "gpus", "gpu_memory_share", "patience_seconds"},
    "train": {"processes", "sharding", "cpu_offload", "tokens_per_micro_batch"},
}


class RunCopies:
    """The copies of a run; does nothing for a job without `checkpoint.copy_to`.

    Every process has one; those that are not the main process only take part in collectives.
    """

    def __init__(
        self,
        config: AnyTraining,
        run: RunDirectory,
        attempt: int,
        accelerator: Accelerator,
        progress: Progress,
    ) -> None:
        """Ask the storage for nothing yet."""
        url = config.checkpoint.copy_to
        self._url = url and f"{url}/{quote(config.name, safe=' =,')}"
        self._config = config
        self._run = run
        self._attempt = attempt
        self._accelerator = accelerator
        self._progress = progress
        self._copied: set[int] = set()  # steps of the checkpoints that are there
        self._unread: set[int] = set()  # of an earlier attempt's checkpoints: perhaps damaged
        self._damaged: set[int] = set()
        self._intact: Path | None = None  # the checkpoint that `fetch` has read or fetched
        self._hurried = False
        self._error: Exception | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def fetch(self, from_step: int | None) -> None:
        """Collective. Claim the copies, and fetch the newest checkpoint if it is not in the run.

        `from_step`: fetch that one. Raises InvalidInput if the copies are those of another job,
        what ObjectFolder raises, and Cancelled if the run is asked to stop while the storage does
        not answer.
        """
        if self._url is not None:
            self._progress.say(f"asking the storage {self._url}", 0)
        self._put(lambda: self._fetch(from_step))
        self._wait()

    def is_intact(self, path: Path) -> bool:
        """Collective. As `checkpoint.intact_for_all`; what `fetch` has read is not read again."""
        known = self._url and largest(self._accelerator, int(path == self._intact))
        return bool(known) or checkpoint.intact_for_all(self._accelerator, path)

    def resumed(self, step: int) -> None:
        """Collective. Delete the copies of steps after `step`, then begin to copy.

        The run goes on from there, and its directory has no later checkpoint. Raises as `fetch`.
        """
        self._put(lambda: self._resumed(step))
        self._wait()
        self.begin()

    def begin(self) -> None:
        """In the main process: begin to copy the newest checkpoint and the best one.

        Any thread may call it. Raises WrongState if another process has claimed the copies. Other
        errors are in the log, and the next call tries again.
        """
        if isinstance(self._error, WrongState):
            raise self._error
        if self._work.empty():
            self._put(self._copy_checkpoints)

    def finish(self, step: int, *, hurry: bool = False) -> None:
        """Collective. Wait until the storage has the newest checkpoint, the metrics and the export.

        Raises what ObjectFolder raises, and Cancelled as `fetch`. `hurry`: a storage that does not
        answer is asked once, and an error is only logged.
        """
        if self._url is None:
            return
        self._hurried = hurry
        self._progress.say(f"copying to {self._url}", step)
        self._put(self._copy_all)
        self._wait(quietly=hurry)

    def close(self) -> None:
        """Wait for the thread, which does not ask a silent storage again. Not collective."""
        if self._thread is not None:
            self._hurried = True
            self._work.put(None)
            self._thread.join()

    def _put(self, work: Callable[[], None]) -> None:
        if self._url is None or not self._accelerator.is_main_process:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_work, name="copies", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _wait(self, *, quietly: bool = False) -> None:
        """Collective. Wait for the thread of the main process; raise its error on all ranks."""
        if self._url is None:
            return
        while largest(self._accelerator, int(self._work.unfinished_tasks > 0)):
            time.sleep(_PAUSE)
        try:
            raise_on_all_ranks(self._accelerator, lambda: None if quietly else self._raise())
        except Unavailable as error:
            if self._progress.stop_wanted():
                raise Cancelled(str(error)) from error
            raise

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run_work(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
                self._error = None
            except Exception as error:
                log.warning("%s: %s", self._url, error)
                self._error = _told(error)
            finally:
                self._work.task_done()

    @cached_property
    def _folder(self) -> ObjectFolder:
        assert self._url is not None
        stopped = self._progress.stop_asked
        return ObjectFolder(self._url, stopped=lambda: self._hurried or stopped())

    def _fetch(self, from_step: int | None) -> None:
        self._require_same_job()
        self._folder.claim()
        self._send("job.json")
        here, there = self._run.checkpoint_steps(), self._steps()
        for step in sorted({*here, *there}, reverse=True):
            if from_step in (None, step):
                path = self._run.checkpoint(step)
                if atomic_directory.is_intact(path) or (step in there and self._fetch_one(step)):
                    self._intact = path
                    break

    def _resumed(self, step: int) -> None:
        for later in [one for one in self._all_steps() if one > step]:
            self._delete(later)
        self._copied = set(self._steps())
        self._unread = {*self._run.checkpoint_steps()} - {step}

    def _require_same_job(self) -> None:
        """Raise InvalidInput if the copies are those of a job with other values."""
        if (found := self._folder.read("job.json")) is None:
            return
        try:
            there = _comparable(parse_job(found))
        except ValidationError as error:
            raise WrongState(
                f"{self._url} has the copies of a job that this version cannot read",
                hint="name another place, or use the version that made them",
            ) from error
        if difference := first_difference(there, _comparable(self._config)):
            key, had, own = difference
            raise InvalidInput(
                f"{self._url} has the copies of a job with another {key}: {had!r}, not {own!r}",
                hint="name another place, give the job another name, or the same values",
            )

    def _fetch_one(self, step: int) -> bool:
        """Fetch a checkpoint and the metrics up to its step; if it is damaged, delete its copy.

        Returns whether it is fetched.
        """
        path = self._run.checkpoint(step)
        place = f"checkpoints/{path.name}/"
        log.info("fetching the checkpoint of step %d from %s", step, self._url)
        self._progress.say(f"fetching the checkpoint of step {step}", step)
        partial = atomic_directory.begin(path)
        for name in self._folder.tree():
            if name.startswith(place):
                file = partial / name.removeprefix(place)
                file.parent.mkdir(parents=True, exist_ok=True)
                self._folder.digest(name, file)
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if not atomic_directory.is_intact(partial):
            shutil.rmtree(partial)
            log.warning("%s: the copy of step %d is damaged", self._url, step)
            self._delete(step)
            return False
        # First, as in a save: a checkpoint must not be newer than its metrics.
        self._fetch_metrics(step)
        atomic_directory.publish(path, _manifest_of(partial))
        return True

    def _fetch_metrics(self, step: int) -> None:
        """Replace metrics.jsonl by the lines up to `step`.

        They are written as this attempt's: the owner of the run then reads them all.
        """
        kept = []
        data = self._folder.read("metrics.jsonl") or b""
        for line in data[: data.rfind(b"\n") + 1].splitlines():  # the last may be incomplete
            values = json.loads(line)
            if values["step"] <= step:
                kept.append(json.dumps({**values, "attempt": self._attempt}) + "\n")
        replace_file(self._run.metrics, "".join(kept))

    def _copy_checkpoints(self) -> None:
        """Copy the newest checkpoint, and the best one, of those that are intact."""
        steps = [one for one in self._run.checkpoint_steps() if one not in self._damaged]
        best = best_step(read_points(self._run.metrics), steps)
        for step in dict.fromkeys((*steps[-1:], *([] if best is None else [best]))):
            if step not in self._copied:
                self._copy_one(step)

    def _copy_one(self, step: int) -> None:
        path = self._run.checkpoint(step)
        if step in self._unread and not atomic_directory.is_intact(path):
            log.warning("%s is damaged, and is not copied", path)
            self._damaged.add(step)
            return
        try:
            # Before the manifest, which makes the checkpoint complete: what `_fetch_one` needs.
            self._send_directory(f"checkpoints/{path.name}", after="metrics.jsonl")
        except FileNotFoundError:
            if path.exists():
                raise
            return  # deleted before it was opened: there is a newer or a better one
        self._copied.add(step)
        self._delete_old()

    def _copy_all(self) -> None:
        self._copy_checkpoints()
        if self._run.metrics.exists():
            self._send("metrics.jsonl")
        if self._run.export.is_dir():
            self._send_directory("export")

    def _send(self, name: str) -> None:
        with (self._run.path / name).open("rb") as file:
            self._folder.send(name, file)

    def _send_directory(self, place: str, after: str = "") -> None:
        """Copy a directory of the run with a manifest, which is sent last, after another file.

        Every file is open before the first is sent: the trainer may delete the directory.
        """
        path = self._run.path / place
        with ExitStack() as stack:
            names = [*_manifest_of(path), _MANIFEST]
            files = {name: stack.enter_context((path / name).open("rb")) for name in names}
            manifest = files.pop(_MANIFEST)
            self._delete_manifest(place)
            for name, file in files.items():
                self._folder.send(f"{place}/{name}", file)
            if after and (self._run.path / after).exists():
                self._send(after)
            self._folder.send(f"{place}/{_MANIFEST}", manifest)

    def _delete_manifest(self, place: str) -> None:
        """First of all: without its manifest a directory is incomplete, and nobody reads it."""
        if self._folder.facts(f"{place}/{_MANIFEST}"):
            self._folder.delete(f"{place}/{_MANIFEST}")

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints that are there, in ascending order."""
        return sorted(step for step, complete in self._all_steps().items() if complete)

    def _all_steps(self) -> Mapping[int, bool]:
        """Return the steps of which there are files, and whether the checkpoint is complete."""
        found: dict[int, bool] = {}
        for name in self._folder.tree():
            match PurePosixPath(name).parts:
                case ("checkpoints", directory, *rest) if directory[5:].isdecimal():
                    step = int(directory[5:])
                    found[step] = found.get(step, False) or rest == [_MANIFEST]
        return found

    def _delete_old(self) -> None:
        """Delete all copies but the newest ones and the best one, as in the run directory."""
        there = self._steps()
        best = best_step(read_points(self._run.metrics), there)
        for step in self._all_steps():
            if step not in (*there[-self._config.checkpoint.keep :], best):
                self._delete(step)

    def _delete(self, step: int) -> None:
        place = f"checkpoints/{self._run.checkpoint(step).name}"
        self._delete_manifest(place)
        self._folder.delete_folder(place)
        self._copied.discard(step)


def _manifest_of(path: Path) -> Mapping[str, atomic_directory.Digests]:
    found: Mapping[str, atomic_directory.Digests] = json.loads((path / _MANIFEST).read_text())[
        "files"
    ]
    return found


def _comparable(config: AnyJob) -> Mapping[str, Any]:
    """Return the values by which two attempts are of one job; of paths, the last part."""
    for key, name in named_files(config):
        config = replaced(config, key, Path(name).name)
    return config.model_dump(mode="json", exclude=dict(_FREE))


def _told(error: Exception) -> Exception:
    """Return a DistillError, which all ranks can raise, that names the key of the job.

    Of a file that is away it is NotFound, of one that is closed to us Forbidden, of any other
    fault of this machine Unavailable.
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
