"""Imports run directories as jobs of a server.

The directories come from `distill run`, or from a server with a lost database. The import copies a
directory, and then adds its job in one transaction. Until then, the table `removals` lists the
copy. If the import is killed, the next server or import deletes the listed copy, but no other
directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.config.kinds import AnyJob
from clients.data.outside import open_regular
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory, Status
from clients.runs.file_system import fsync_directory
from clients.runs.metrics_file import MetricsTail
from distill_server.jobs.database import transaction
from distill_server.jobs.rows import Attempt, Change, NewJob
from distill_server.jobs.store import JobStore
from distill_server.retention.removals import delete_run
from protos.errors import DistillError, InvalidInput, WrongState
from protos.rpc.failpoints import failpoint

# Ids as `run_ids` creates them. Other characters must not be part of a path or of an id's prefix.
_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_ATTEMPT = re.compile(r"attempt-([1-9]\d{0,5})")
# The largest numbers of an attempt and of a step that the pattern and SQLite allow.
_MAX_ATTEMPTS, _MAX_STEPS = 999_999, 2**63 - 1
# For each verdict of a program: the states of the job at the end, and the default reason.
_ENDS = {
    "succeeded": ((JobState.SUCCEEDED,), ""),
    "failed": ((JobState.FAILED,), "the trainer gave no reason"),
    "cancelled": ((JobState.CANCELLING, JobState.CANCELLED), "cancelled on request"),
    "running": ((JobState.CANCELLING, JobState.CANCELLED), "imported before it had ended"),
}


@dataclass(frozen=True)
class ImportResult:
    """The result of the import of one directory.

    - `name`: name of the directory
    - `outcome`: "taken" if the import added a job, "known" if the server already has a job with
      this id, or "refused"
    - `about`: state of the job, and its number of steps if the import added the job; for a refused
      directory, the reason
    """

    name: str
    outcome: str
    about: str


def import_runs(connection: sqlite3.Connection, runs: Path, source: Path) -> Iterator[ImportResult]:
    """Add the run directories in `source` to the jobs of a server with the directory `runs`.

    Directories outside `runs` are copied to `runs`. Runs that started earlier are added earlier.
    Hidden directories are skipped. Raises InvalidInput if `source` is not a directory, or is a run
    directory itself.
    """
    if not source.is_dir():
        raise InvalidInput(
            f"no such directory: {source}", field="--import", hint="name a directory of runs"
        )
    if RunDirectory(source).job_json.exists():
        raise InvalidInput(
            f"{source} is a run directory", field="--import", hint="give its parent directory"
        )
    directories = [path for path in source.iterdir() if path.name[0] != "." and _is_directory(path)]
    for path in sorted(directories, key=lambda path: (_read_start(path), path.name)):
        try:
            yield _import_run(connection, runs, path)
        except (DistillError, OSError, ValueError, OverflowError) as error:
            yield ImportResult(path.name, "refused", _format_error(error))


def _import_run(connection: sqlite3.Connection, runs: Path, source: Path) -> ImportResult:
    """Import one directory. Raises DistillError or OSError if it cannot be imported."""
    name, (started_at, changed_at) = source.name, _read_times(source)
    config = RunDirectory(source).config()
    if not _ID.fullmatch(name):
        raise InvalidInput(
            "the name of the directory is not a valid job id",
            hint="rename the directory: up to 100 of a-z, 0-9, '.' and '-'",
        )
    store = JobStore(connection, lambda job_id: None, lambda: changed_at)
    if store.has(name):
        return ImportResult(name, "known", f"{store.job(name).state}")
    run = RunDirectory(runs / name)
    run_path, source_path = (Path(os.path.realpath(path)) for path in (run.path, source))
    if store.is_used(name):
        if source_path.is_relative_to(run_path):
            raise WrongState(
                "the directory will be deleted: it belongs to a removed job or a killed import",
                hint="start the server to delete the directory, or move the directory away first",
            )
        _discard_copy(connection, runs, name)
    _require_idle(source)
    if run_path == source_path:
        _add_job(store, connection, run, config, started_at)
    else:
        _add_copy(store, connection, source, run, config, started_at)
    job = store.job(name)
    return ImportResult(name, "taken", f"{job.state} {job.step}/{job.max_steps}")


def _add_copy(
    store: JobStore,
    connection: sqlite3.Connection,
    source: Path,
    run: RunDirectory,
    config: AnyJob,
    started_at: float,
) -> None:
    """Copy a run directory and add its job; if that fails, delete the copy."""
    if os.path.lexists(run.path):
        raise WrongState(
            f"cannot copy {source} to {run.path}, because {run.path} already exists",
            hint=f"move {run.path} away, or rename {source}",
        )
    with transaction(connection):
        connection.execute("INSERT INTO removals VALUES (?)", (run.path.name,))
    try:
        _copy_run(source, run.path)
        failpoint("run-imported")
        _add_job(store, connection, run, config, started_at)
    except BaseException:
        _discard_copy(connection, run.path.parent, run.path.name)
        raise


def _add_job(
    store: JobStore,
    connection: sqlite3.Connection,
    run: RunDirectory,
    config: AnyJob,
    started_at: float,
) -> None:
    """Add the job of a run directory, and remove the directory from the table `removals`."""
    name, history = run.path.name, _read_history(run)
    with transaction(connection):
        store.insert_job(NewJob(name, config, config))
        for number, changes in history.items():
            if number > 1:
                store.next_attempt(name, Attempt(number))
                store.write(name, Change(JobState.QUEUED))
            for change in changes:
                store.write(name, change)
        connection.execute(
            "UPDATE jobs SET created_at = :at, started_at = :at, imported_at = :now WHERE id = :id",
            {"at": started_at, "now": time.time(), "id": name},
        )
        connection.execute("DELETE FROM removals WHERE job_id = ?", (name,))


def _discard_copy(connection: sqlite3.Connection, runs: Path, name: str) -> None:
    """Delete a directory that is listed in `removals`, and then its entry there."""
    delete_run(runs, name)
    with transaction(connection):
        connection.execute("DELETE FROM removals WHERE job_id = ?", (name,))


def _read_history(run: RunDirectory) -> dict[int, Sequence[Change]]:
    """Return the changes of state of each attempt, as if a server had run the job."""
    status = run.read_status() or Status(attempt=1, verdict="running")
    _require_within("status.json: attempt", status.attempt, 1, _MAX_ATTEMPTS)
    _require_within("status.json: step", status.step, 0, _MAX_STEPS)
    _require_within("status.json: max_steps", status.max_steps, 0, _MAX_STEPS)
    matches = (_ATTEMPT.fullmatch(path.name) for path in run.logs(1).parent.glob("attempt-*"))
    numbers = sorted({1, status.attempt, *(int(match[1]) for match in matches if match)})
    history: dict[int, Sequence[Change]] = {}
    for number in numbers:
        tail = MetricsTail(run.metrics, attempt=number, seen_step=-1)
        points = tail.read_all()
        if points:  # in ascending order
            _require_within("metrics.jsonl: step", points[-1].step, 0, _MAX_STEPS)
        steps = [Change(step=point.step, metrics=point.metrics) for point in points]
        history[number] = [Change(JobState.PREPARING), Change(JobState.RUNNING), *steps]
    (*earlier_states, state), reason = _ENDS[status.verdict]
    last_step = max([status.step, *(change.step or 0 for change in history[numbers[-1]])])
    end = Change(
        state,
        reason=status.reason or reason,
        phase="",
        step=last_step or None,
        max_steps=status.max_steps or None,
    )
    history[numbers[-1]] = [*history[numbers[-1]], *map(Change, earlier_states), end]
    return history


def _require_within(field: str, number: int, minimum: int, maximum: int) -> None:
    if not minimum <= number <= maximum:
        raise InvalidInput(
            f"{field} is {number}", hint=f"write a whole number from {minimum} to {maximum}"
        )


def _require_idle(path: Path) -> None:
    """Raise WrongState if a program of this machine runs in the directory."""
    try:
        lock = open_regular(path / ".trainer.lock")
    except FileNotFoundError:
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WrongState(
                "a program is running in this directory", hint="wait for the program, or stop it"
            ) from error


def _copy_run(source: Path, path: Path) -> None:
    """Copy a directory; the copy appears under its name when it is complete."""
    partial = path.with_name(f".{path.name}.import")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial, symlinks=True)
        partial.chmod(0o700)  # as a new run directory, whatever the mode of the source
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(path)
    fsync_directory(path.parent)


def _is_directory(path: Path) -> bool:
    """Return True for a directory, and if the check fails, so that the import reports the error."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _read_start(path: Path) -> float:
    """Return the start of the run in Unix seconds; 0 if its files cannot be read."""
    try:
        return _read_times(path)[0]
    except OSError:
        return 0.0


def _read_times(path: Path) -> tuple[float, float]:
    """Return the start of the run and the last change of its files, in Unix seconds."""
    names = ("job.json", "status.json", "metrics.jsonl", "logs")
    times = [(path / name).stat().st_mtime for name in names if (path / name).exists()]
    return min(times, default=0.0), max(times, default=0.0)


def _format_error(error: Exception) -> str:
    if isinstance(error, DistillError):
        return str(error)
    if isinstance(error, shutil.Error):  # a list of (source, copy, reason)
        return str(error.args[0][0][2])
    if isinstance(error, OSError):
        return f"{error.filename or 'its files'}: {error.strerror or error}"
    return f"the files cannot be read: {error}"
