"""Run directories of `distill run`, or of a server whose database is lost, become jobs of a server.

A directory is copied whole, and then its job is added in one transaction. So an import that was
killed can be repeated: what is a job already is left alone.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory, Status, fsync_directory
from clients.runs.metrics_follower import MetricsTail
from distill_server.jobs.database import transaction
from distill_server.jobs.rows import Attempt, Change, NewJob
from distill_server.jobs.store import JobStore
from protos.errors import DistillError, InvalidInput, WrongState
from protos.rpc.failpoints import failpoint

# As `run_ids` makes them. Nothing else may be part of a path, or of the prefix of an id.
_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_ATTEMPT = re.compile(r"attempt-([1-9]\d{0,5})")
# The states of an end, and a reason for people where the program gave none.
_ENDS = {
    "succeeded": ((JobState.SUCCEEDED,), ""),
    "failed": ((JobState.FAILED,), "the trainer gave no reason"),
    "cancelled": ((JobState.CANCELLING, JobState.CANCELLED), "cancelled on request"),
    "running": ((JobState.CANCELLING, JobState.CANCELLED), "imported before it had ended"),
}


@dataclass(frozen=True)
class Imported:
    """What became of one directory: `outcome` is taken, known or refused; `about` says more."""

    name: str
    outcome: str
    about: str


def import_runs(connection: sqlite3.Connection, runs: Path, source: Path) -> Iterator[Imported]:
    """Add the run directories in `source` to the jobs of a server with the directory `runs`.

    Those that are not in `runs` are copied there. They come in the order of their beginnings.
    Hidden directories are left out. Raises InvalidInput if `source` is no directory, or is a run
    directory itself.
    """
    if not source.is_dir():
        raise InvalidInput(
            f"no such directory: {source}", field="--import", hint="name a directory of runs"
        )
    if RunDirectory(source).job_json.exists():
        raise InvalidInput(
            f"{source} is a run directory", field="--import", hint="name the directory it is in"
        )
    found = [path for path in source.iterdir() if path.is_dir() and path.name[0] != "."]
    for path in sorted(found, key=lambda path: (_times(path)[0], path.name)):
        try:
            yield _imported(connection, runs, path)
        except (DistillError, OSError, shutil.Error) as error:
            yield Imported(path.name, "refused", _reason(error))


def _imported(connection: sqlite3.Connection, runs: Path, source: Path) -> Imported:
    """Import one directory. Raises DistillError or OSError if it cannot be."""
    name, (began, ended) = source.name, _times(source)
    config = RunDirectory(source).config()
    if not _ID.fullmatch(name):
        raise InvalidInput(
            "its name is no id of a job", hint="rename it: up to 100 of a-z, 0-9, '.' and '-'"
        )
    store = JobStore(connection, lambda job_id: None, lambda: ended)
    if store.has(name):
        return Imported(name, "known", f"{store.job(name).state}")
    if store.is_used(name):
        raise WrongState("a removed job had this id, and its files are still being deleted")
    _require_idle(source)
    run = RunDirectory(runs / name)
    if run.path.resolve() != source.resolve():
        _copy(source, run.path)
    failpoint("run-imported")
    with transaction(connection):
        store.insert_job(NewJob(name, config, config))
        for number, changes in _history(run).items():
            if number > 1:
                store.next_attempt(name, Attempt(number))
                store.write(name, Change(JobState.QUEUED))
            for change in changes:
                store.write(name, change)
        began_at = "UPDATE jobs SET created_at = :at, started_at = :at WHERE id = :id"
        connection.execute(began_at, {"at": began, "id": name})
    job = store.job(name)
    return Imported(name, "taken", f"{job.state} {job.step}/{job.max_steps}")


def _history(run: RunDirectory) -> dict[int, Sequence[Change]]:
    """Return the changes of each attempt, from 1 on, as a server would have seen them."""
    status = run.read_status() or Status(attempt=1, verdict="running")
    matches = (_ATTEMPT.fullmatch(path.name) for path in run.logs(1).parent.glob("attempt-*"))
    numbers = sorted({1, status.attempt, *(int(found[1]) for found in matches if found)})
    history: dict[int, Sequence[Change]] = {}
    for number in numbers:
        tail = MetricsTail(run.metrics, attempt=number, seen_step=-1)
        points = tail.read_all()
        steps = [Change(step=point.step, metrics=point.metrics) for point in points]
        history[number] = [Change(JobState.PREPARING), Change(JobState.RUNNING), *steps]
    (*before, state), reason = _ENDS[status.verdict]
    reached = max([status.step, *(change.step or 0 for change in history[numbers[-1]])])
    end = Change(
        state,
        reason=status.reason or reason,
        phase="",
        step=reached or None,
        max_steps=status.max_steps or None,
    )
    history[numbers[-1]] = [*history[numbers[-1]], *map(Change, before), end]
    return history


def _require_idle(path: Path) -> None:
    """Raise WrongState if a program of this machine runs in the directory."""
    lock = path / ".trainer.lock"
    if not lock.exists():
        return
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WrongState(
                "a program is running in it", hint="wait for it, or stop it"
            ) from error


def _copy(source: Path, path: Path) -> None:
    """Copy a directory; it has its name when it is whole. An earlier copy is used as it is."""
    if path.exists():
        job = RunDirectory(path).job_json
        if job.exists() and job.read_bytes() == RunDirectory(source).job_json.read_bytes():
            return
        raise WrongState(f"{path} exists", hint="move it away, or rename this directory")
    partial = path.with_name(f".{path.name}.import")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial, symlinks=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(path)
    fsync_directory(path.parent)


def _times(path: Path) -> tuple[float, float]:
    """Return when the run began and when its files last changed, in Unix seconds."""
    names = ("job.json", "status.json", "metrics.jsonl", "logs")
    found = [(path / name).stat().st_mtime for name in names if (path / name).exists()]
    return min(found, default=0.0), max(found, default=0.0)


def _reason(error: Exception) -> str:
    if isinstance(error, shutil.Error):  # a list of (source, copy, why)
        return str(error.args[0][0][2])
    if isinstance(error, OSError) and not isinstance(error, DistillError):
        return f"{error.filename or 'its files'}: {error.strerror or error}"
    return str(error)
