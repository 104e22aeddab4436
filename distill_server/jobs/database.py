"""The SQLite database of a server: one process opens it and writes through one connection."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from clients.runs.best_step import best_step
from clients.runs.metrics_file import Point
from distill_server.jobs.extremes import add_extremes
from distill_server.jobs.runs_owner import exclusive_lock
from protos.errors import Corrupt, InvalidInput, NotFound, Unavailable, WrongState

_FIRST_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of submission
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    config_json TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    phase TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    max_steps INTEGER NOT NULL,
    metrics TEXT NOT NULL,  -- a JSON object, of the newest step
    created_at REAL NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL NOT NULL,
    last_seq INTEGER NOT NULL,
    place INTEGER NOT NULL  -- in the queue
);
CREATE INDEX jobs_by_state ON jobs (state, place);
CREATE INDEX jobs_by_place ON jobs (place);
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    retries INTEGER NOT NULL,  -- automatic ones, since a person last asked for an attempt
    from_step INTEGER,  -- NULL: the newest checkpoint
    seen_step INTEGER NOT NULL,  -- newest step whose metrics are among the events
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    seq INTEGER NOT NULL,
    time REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    phase TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    max_steps INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (job_id, seq)
) WITHOUT ROWID;
CREATE TABLE submissions (
    idempotency_key TEXT PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    config_sha256 TEXT NOT NULL
) WITHOUT ROWID;
"""
_RESOURCES = """
ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;  -- higher ones start first
DROP INDEX jobs_by_state;
CREATE INDEX jobs_by_state ON jobs (state, priority DESC, place);
ALTER TABLE attempts ADD COLUMN cpus INTEGER NOT NULL DEFAULT 0;  -- threads it was given
ALTER TABLE attempts ADD COLUMN gpus TEXT;  -- with commas between; NULL: they are not divided
"""
_WAITS = """
ALTER TABLE attempts ADD COLUMN waiting_since REAL NOT NULL DEFAULT 0;  -- no progress, blameless
ALTER TABLE attempts ADD COLUMN waits_for TEXT NOT NULL DEFAULT '';  -- what was away
ALTER TABLE jobs ADD COLUMN queued_at REAL NOT NULL DEFAULT 0;  -- the last time
UPDATE jobs SET queued_at = created_at;
"""
_DEPENDENCIES = """
CREATE TABLE dependencies (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    before_id TEXT NOT NULL REFERENCES jobs (id),  -- must succeed before job_id starts
    PRIMARY KEY (job_id, before_id)
) WITHOUT ROWID;
"""
_TEACHERS = """
ALTER TABLE attempts ADD COLUMN teacher TEXT NOT NULL DEFAULT '';  -- key of a started teacher
"""
_REMOVALS = """
ALTER TABLE jobs ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;  -- 1: never removed
CREATE TABLE removals (job_id TEXT PRIMARY KEY) WITHOUT ROWID;  -- whose files are to be deleted
-- For the check that a removed job is referred to by no row.
CREATE INDEX submissions_by_job ON submissions (job_id);
CREATE INDEX dependencies_by_before ON dependencies (before_id);
"""
_PEOPLE = """
ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';  -- of the token that submitted it
ALTER TABLE jobs ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';  -- a JSON object of texts
-- For the jobs of an owner that have yet to be told that they wait for the owner's quota.
CREATE INDEX jobs_untold ON jobs (owner) WHERE state = 'QUEUED' AND phase = '';
"""
_IMPORTS = """
ALTER TABLE jobs ADD COLUMN imported_at REAL NOT NULL DEFAULT 0;  -- 0: it was submitted here
"""
_IDENTITY = """
CREATE TABLE server (id TEXT NOT NULL);  -- one row: the id of this database, in its copies too
INSERT INTO server VALUES (lower(hex(randomblob(16))));
"""
_EXTREMES = """
CREATE TABLE extremes (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id),
    attempt INTEGER NOT NULL,  -- the newest one of the deleted events
    curves TEXT NOT NULL  -- JSON: by metric a list of steps and a list of values
) WITHOUT ROWID;
"""
# Step n migrates schema n - 1 to schema n. Never change a released step: add a new one.
_STEPS = (
    *(_FIRST_SCHEMA, _RESOURCES, _WAITS, _DEPENDENCIES, _TEACHERS, _REMOVALS, _PEOPLE, _IMPORTS),
    *(_IDENTITY, _EXTREMES),
)
NEWEST = OLDER = 500
# Old events of a job are deleted each time that the job has this many more events.
_EVERY = 500
# Part of the JSON text of the metrics of an evaluation.
_EVALUATION = '"eval/'


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database at `path`, create it if missing, and migrate it to the newest schema.

    A lock file next to the database excludes other servers while the database is open. Raises
    WrongState if another server holds the lock or a newer server wrote the schema, Corrupt if the
    file is damaged, Unavailable if the migration cannot be written.
    """
    with exclusive_lock(path.with_suffix(".lock")):
        # SQLite copies the mode of the database to its journal files.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _prepare_connection(connection, path)
            yield connection
        finally:
            connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in one transaction, which is durable when the block exits without an error.

    Any error rolls the transaction back. Raises Unavailable if SQLite cannot write.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        _roll_back(connection)
        raise Unavailable(
            f"the server cannot write its job database: {error}",
            hint="check the free space on the server's disk",
        ) from error
    except BaseException:
        _roll_back(connection)
        raise


def _roll_back(connection: sqlite3.Connection) -> None:
    # After some errors, such as a full disk, SQLite has already rolled back.
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _prepare_connection(connection: sqlite3.Connection, path: Path) -> None:
    try:
        integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
    except sqlite3.DatabaseError as error:
        integrity = str(error)
    if integrity != "ok":
        raise Corrupt(
            f"{path} is damaged: {integrity}",
            hint="restore the database from a backup, or move the file away",
        )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    _migrate_schema(connection, path)


def _migrate_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate to the newest schema, one transaction per step; an interrupted step runs again."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(_STEPS):
        raise WrongState(
            f"{path} has schema version {version}; this server reads up to version {len(_STEPS)}",
            hint="run the server version that wrote the database, or a newer one",
        )
    for number, step in enumerate(_STEPS[version:], start=version + 1):
        try:
            connection.executescript(f"BEGIN; {step} PRAGMA user_version = {number}; COMMIT;")
        except sqlite3.OperationalError as error:
            _roll_back(connection)
            raise Unavailable(
                f"{path} cannot be migrated to schema version {number}: {error}",
                hint="check the free space on the server's disk",
            ) from error


def back_up(database: Path, copy: Path) -> None:
    """Write the current database to the new file `copy`, which appears when it is complete.

    The copy has every job that the server acknowledged before the call. The database is only
    read, so the server is not disturbed. Raises NotFound if there is no database,
    InvalidInput if `copy` exists, Unavailable if `copy` cannot be written.
    """
    if not database.is_file():
        raise NotFound(
            f"no job database: {database}",
            field="--database",
            hint="give the --runs of the server, or its --database",
        )
    if copy.exists():
        raise InvalidInput(f"{copy} already exists", field="--backup", hint="give a new file name")
    partial = copy.with_name(f".{copy.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        source = sqlite3.connect(database)
        with closing(source), closing(sqlite3.connect(partial)) as target:
            source.execute("PRAGMA query_only = ON")
            source.backup(target)
            # A single file, without the files of write-ahead logging.
            target.execute("PRAGMA journal_mode = DELETE")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(copy)
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(
            f"cannot write {copy}: {error}", field="--backup", hint="check the disk"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def steady_clock() -> Callable[[], float]:
    """Return a function that returns Unix seconds unaffected by changes of the machine's clock."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


def thin_events(connection: sqlite3.Connection, job_id: str, last_seq: int) -> None:
    """Delete old events of a job if `last_seq` is a multiple of 500 (_EVERY).

    Call this function for each new event, in a transaction; `last_seq` is the seq of the new event.
    A deletion takes about 10 ms. It keeps:

    - the newest NEWEST events
    - changes of the state, the attempt or the reason
    - at most OLDER steps with an evaluation, and at most OLDER steps without; in both groups, the
      steps that are multiples of a power of two
    - the evaluations that select a checkpoint

    So a job has about NEWEST + 2 * OLDER + _EVERY events, not counting changes of state. The
    extreme values of the deleted events are stored for charts (extremes.py).
    """
    if last_seq % _EVERY or last_seq <= NEWEST + OLDER:
        return
    rows = connection.execute(
        "SELECT seq, step, metrics, state, attempt, reason FROM events"
        " WHERE job_id = ? AND seq <= ? ORDER BY seq",
        (job_id, last_seq - NEWEST),
    ).fetchall()
    (config,) = connection.execute(
        "SELECT config_json FROM jobs WHERE id = ?", (job_id,)
    ).fetchone()
    interval = json.loads(config).get("checkpoint", {}).get("every", 1)
    deletions = list(_select_deletions(rows, interval))
    add_extremes(connection, job_id, rows, set(deletions))
    connection.executemany(
        "DELETE FROM events WHERE job_id = ? AND seq = ?", [(job_id, seq) for seq in deletions]
    )


def _select_deletions(rows: Sequence[sqlite3.Row], interval: int) -> Iterable[int]:
    """Return the seqs of the events to delete.

    `rows` are the events in order of seq. `interval` is the number of steps between two
    checkpoints.
    """
    phases: list[int] = []
    steps: dict[int, int] = {}
    evaluations: dict[int, int] = {}
    for previous, row in pairwise(rows):
        if _state_of(previous) != _state_of(row):
            continue
        if row["metrics"] == "{}":
            phases.append(row["seq"])
        else:
            group = evaluations if _EVALUATION in row["metrics"] else steps
            group[row["seq"]] = row["step"]
    unneeded = _exceed(evaluations)
    if unneeded:
        kept_steps = _selecting_steps(
            [row for row in rows if _EVALUATION in row["metrics"]], interval
        )
        newest = {step: seq for seq, step in evaluations.items()}
        kept_seqs = {seq for step, seq in newest.items() if step in kept_steps}
        unneeded = [seq for seq in unneeded if seq not in kept_seqs]
    return [*phases, *_exceed(steps), *unneeded]


def _selecting_steps(rows: Sequence[sqlite3.Row], interval: int) -> set[int | None]:
    """Return the steps whose evaluations select the best checkpoint and the best result.

    The result has the best step of all, the best step with a checkpoint, and the last step of each
    attempt. Checkpoints are written at multiples of `interval` and at the end of an attempt.
    """
    points = [Point(row["step"], json.loads(row["metrics"])) for row in rows]
    last_steps = set({row["attempt"]: row["step"] for row in rows}.values())
    checkpoints = {point.step for point in points if point.step % interval == 0}
    all_steps = {point.step for point in points}
    return {best_step(points, steps) for steps in (all_steps, checkpoints)} | last_steps


def _exceed(step_by_seq: Mapping[int, int]) -> list[int]:
    """Return the seqs of the events to delete, so that at most OLDER events remain.

    The remaining steps are the multiples of a power of two, the smallest one that suffices. If
    several attempts made a step, only the newest event of the step remains.
    """
    if len(step_by_seq) <= OLDER:
        return []
    newest = {step: seq for seq, step in step_by_seq.items()}
    stride = 1
    while sum(step % stride == 0 for step in newest) > OLDER:
        stride *= 2
    kept_seqs = {seq for step, seq in newest.items() if step % stride == 0}
    return [seq for seq in step_by_seq if seq not in kept_seqs]


def _state_of(row: sqlite3.Row) -> tuple[object, ...]:
    return row["state"], row["attempt"], row["reason"]
