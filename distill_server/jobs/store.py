"""The database tables of jobs, attempts and events.

Calls are short (a durable write takes about 0.4 ms), so the server makes them on its event loop.
No other code runs between the statements of one call.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from clients.config.kinds import AnyJob
from clients.jobs.job import TERMINAL, TRANSITIONS, Job, JobEvent, JobState
from distill_server.jobs.database import steady_clock, thin_events, transaction
from distill_server.jobs.extremes import Extremes, read_extremes
from distill_server.jobs.job_file import digest_of, is_same_job
from distill_server.jobs.rows import (
    NEWEST_FIRST,
    PHASE_CHARS,
    JobFilter,
    ListOrder,
    NewJob,
    job_of,
    parse_row,
    share_of,
)
from distill_server.jobs.rows import Attempt as Attempt
from distill_server.jobs.rows import Change as Change
from distill_server.jobs.rows import Tally as Tally
from distill_server.pipelines.dependencies import ALL_MET, Dependencies
from distill_server.runners.machine import Share
from protos.errors import InvalidInput, NotFound, WrongState

ACTIVE = (JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING)
# Limits, so that a page of jobs fits into one gRPC message.
_REASON_CHARS, _CANDIDATES_SHOWN = 2000, 10
_EVENT_FIELDS = "seq, time, state, reason, phase, attempt, step, max_steps, metrics"


class JobStore:
    """Reads and writes jobs in an open database (`database.open_database`).

    `on_change` is called with a job's id after each durable change of the job. `now` returns the
    time of an event in Unix seconds. Not thread-safe: call all methods on the event loop. Each
    method that writes raises Unavailable if the database cannot be written.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        on_change: Callable[[str], None],
        now: Callable[[], float] | None = None,
    ) -> None:
        self._db = connection
        self._on_change = on_change
        self._now = now or steady_clock()
        self.dependencies, self.tally = Dependencies(connection), Tally()

    def find_submitted(self, idempotency_key: str, config: AnyJob) -> Job | None:
        """Return the job that was submitted with this key, or None.

        Raises InvalidInput if the key belongs to a job with another configuration.
        """
        row = self._db.execute(
            "SELECT * FROM submissions WHERE idempotency_key = ?", (idempotency_key,)
        ).fetchone()
        if row is None:
            return None
        job = self.job(row["job_id"])
        if row["config_sha256"] != digest_of(config) and not is_same_job(job.config_json, config):
            raise InvalidInput(
                f"this key was already used to submit another job, {job.id}",
                field="idempotency_key",
                hint="use a new key for each job",
            )
        return job

    def add(self, job_id: str, config: AnyJob, idempotency_key: str) -> Job:
        """Add a job at the end of the queue. An empty `idempotency_key` means no key."""
        return self.add_all([NewJob(job_id, config, config, idempotency_key)])[0]

    def add_all(self, new_jobs: Sequence[NewJob]) -> list[Job]:
        """Add jobs at the end of the queue, in one transaction."""
        with transaction(self._db):
            for new_job in new_jobs:
                self.insert_job(new_job)
        for new_job in new_jobs:
            self._on_change(new_job.id)
        return [self.job(new_job.id) for new_job in new_jobs]

    def insert_job(self, new_job: NewJob) -> None:
        """Insert a job at the end of the queue; the caller opens the transaction."""
        now, config = self._now(), new_job.config
        self._db.execute(
            "INSERT INTO jobs (id, name, kind, config_json, state, reason, phase, attempt,"
            " step, max_steps, metrics, created_at, queued_at, started_at, ended_at, last_seq,"
            " place, priority, owner, labels)"
            " VALUES (?, ?, ?, ?, ?, '', '', 1, 0, ?, '{}', ?, ?, 0, 0, 0, ?, ?, ?, ?)",
            (
                *(new_job.id, config.name, config.method.type, config.model_dump_json()),
                *(JobState.QUEUED, config.max_steps, now, now),
                *(self._next_place(), config.priority, new_job.owner, json.dumps(config.labels)),
            ),
        )
        waiting_since = now if new_job.waits_for else 0.0
        attempt = Attempt(1, waiting_since=waiting_since, waits_for=new_job.waits_for)
        self._insert_attempt(new_job.id, attempt)
        self.dependencies.insert(new_job.id, new_job.dependencies)
        if new_job.key:
            self._db.execute(
                "INSERT INTO submissions VALUES (?, ?, ?)",
                (new_job.key, new_job.id, digest_of(new_job.submitted_config)),
            )
        self.write(new_job.id, Change())

    def job(self, job_id: str) -> Job:
        """Return the job with exactly this id; raises NotFound if there is none."""
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise NotFound(
                f"no job {job_id!r}", field="job_id", hint="run distill ls to list all jobs"
            )
        return job_of(row)

    def find(self, text: str) -> Job:
        """Return the job with the id `text`, or else the newest job with the name `text`.

        If there is no such job, returns the result of `resolve`, which raises NotFound or
        InvalidInput.
        """
        row = self._db.execute(
            "SELECT * FROM jobs WHERE id = :text OR name = :text"
            " ORDER BY id = :text DESC, number DESC LIMIT 1",
            {"text": text},
        ).fetchone()
        return self.resolve(text) if row is None else job_of(row)

    def has(self, job_id: str) -> bool:
        """Return True if there is a job with exactly this id."""
        return bool(self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone())

    def is_used(self, job_id: str) -> bool:
        """Return True if a job has this id, or a removed job had it and its files still exist."""
        ids = "SELECT id FROM jobs UNION ALL SELECT job_id FROM removals"
        return bool(self._db.execute(f"SELECT 1 FROM ({ids}) WHERE id = ?", (job_id,)).fetchone())

    def resolve(self, text: str) -> Job:
        """Return a job by its id, an unambiguous prefix of the id, or `@last` for the newest job.

        Raises NotFound if no job matches, InvalidInput with the candidates if several jobs match.
        """
        if text == "@last":
            newest_jobs = self.page(limit=1)
            if not newest_jobs:
                raise NotFound("there are no jobs yet", field="job_id")
            return newest_jobs[0]
        if not text or self.has(text):
            return self.job(text)
        # Ids consist of a-z, 0-9, "." and "-", which all sort before "~".
        rows = self._db.execute(
            "SELECT id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (text, text + "~", _CANDIDATES_SHOWN + 1),
        ).fetchall()
        if len(rows) > 1:
            names = [row["id"] for row in rows[:_CANDIDATES_SHOWN]]
            ellipsis = ", ..." if len(rows) > _CANDIDATES_SHOWN else ""
            raise InvalidInput(
                f"{text!r} is ambiguous: it matches {', '.join(names)}{ellipsis}",
                field="job_id",
                hint="give more characters of the id",
            )
        return self.job(rows[0]["id"] if rows else text)

    def page(
        self,
        *,
        limit: int,
        before_id: str = "",
        job_filter: JobFilter | None = None,
        order: ListOrder = NEWEST_FIRST,
        offset: int = 0,
    ) -> list[Job]:
        """Return up to `limit` jobs in this order, after the first `offset` jobs.

        If `before_id` is given, only jobs that are older than this job are returned.
        """
        condition, parameters = (job_filter or JobFilter()).condition()
        rows = self._db.execute(
            f"SELECT * FROM jobs WHERE {condition} AND"
            " (:before = '' OR number < (SELECT number FROM jobs WHERE id = :before))"
            f" ORDER BY {order.terms()} LIMIT :limit OFFSET :offset",
            {"before": before_id, "limit": limit, "offset": offset, "now": self._now()}
            | parameters,
        )
        return [job_of(row) for row in rows]

    def count_by_state(self, search: str = "") -> dict[JobState, int]:
        """Return the number of jobs in each of the seven states.

        `search` selects the jobs to count, as in `JobFilter`.
        """
        condition, parameters = JobFilter(search).condition()
        query = f"SELECT state, count(*) FROM jobs WHERE {condition} GROUP BY state"
        counts = {JobState(state): count for state, count in self._db.execute(query, parameters)}
        return {state: counts.get(state, 0) for state in JobState}

    def in_state(self, *states: JobState, limit: int = -1, condition: str = "1") -> Sequence[Job]:
        """Return jobs in one of these states, in the order of the queue.

        The job with the highest priority is first; of equal priorities, the job with the oldest
        place. A `limit` of -1 means no limit. `condition` is an SQL condition on rows of `jobs`.
        """
        marks = ", ".join("?" * len(states))
        rows = self._db.execute(
            f"SELECT * FROM jobs INDEXED BY jobs_by_state WHERE state IN ({marks}) AND {condition}"
            " ORDER BY priority DESC, place LIMIT ?",
            (*states, limit),
        )
        return [job_of(row) for row in rows]

    def startable_jobs(self, limit: int, condition: str = "1") -> Sequence[Job]:
        """Return the QUEUED jobs whose dependencies have succeeded, ordered as in `in_state`."""
        return self.in_state(JobState.QUEUED, limit=limit, condition=f"{ALL_MET} AND {condition}")

    def oldest_wait(self) -> float:
        """Return the seconds that the first job of the queue has waited; 0 without a queued job."""
        row = self._db.execute(
            "SELECT queued_at FROM jobs INDEXED BY jobs_by_state WHERE state = ?"
            " ORDER BY priority DESC, place LIMIT 1",
            (JobState.QUEUED,),
        ).fetchone()
        return 0.0 if row is None else max(0.0, self._now() - row["queued_at"])

    def queue(self) -> Sequence[str]:
        """Return the ids of all QUEUED jobs in the order of the queue."""
        rows = self._db.execute(
            "SELECT id FROM jobs INDEXED BY jobs_by_state WHERE state = ?"
            " ORDER BY priority DESC, place",
            (JobState.QUEUED,),
        )
        return [row["id"] for row in rows]

    def queued_at(self, job_id: str) -> float:
        """Return the Unix time at which the newest attempt of a job was queued."""
        row = self._db.execute("SELECT queued_at FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return float(row["queued_at"])

    def queue_length(self) -> int:
        """Return the number of QUEUED jobs."""
        count = "SELECT count(*) FROM jobs INDEXED BY jobs_by_state WHERE state = ?"
        return int(self._db.execute(count, (JobState.QUEUED,)).fetchone()[0])

    def held_shares(self) -> Sequence[Share]:
        """Return the CPU threads and GPUs that the active jobs hold, one Share per job."""
        return list(self.shares_by_job().values())

    def shares_by_job(self) -> Mapping[str, Share]:
        """Return the CPU threads and GPUs that the active jobs hold, by the id of the job."""
        return {row["id"]: share_of(row) for row in self._select_active("id, cpus, gpus")}

    def users_of_teachers(self) -> Mapping[str, Sequence[str]]:
        """Return the ids of the active jobs that use a teacher of the server, by teacher key."""
        users: dict[str, list[str]] = {}
        for key, job_id in self._select_active("teacher, id"):
            users.setdefault(key, []).append(job_id)
        return {key: ids for key, ids in users.items() if key}

    def _select_active(self, columns: str) -> sqlite3.Cursor:
        marks = ", ".join("?" * len(ACTIVE))
        return self._db.execute(
            f"SELECT {columns} FROM jobs INDEXED BY jobs_by_state JOIN attempts"
            f" ON job_id = id AND attempts.number = attempt WHERE state IN ({marks})",
            ACTIVE,
        )

    def begin_attempt(self, job: Job, share: Share, change: Change, teacher: str = "") -> Job:
        """Record the share of the newest attempt and apply `change`, which makes the job active.

        `teacher` is the key of the teacher that the server runs for the job.
        """
        gpus = None if share.gpus is None else ",".join(share.gpus)
        with transaction(self._db):
            self._db.execute(
                "UPDATE attempts SET cpus = ?, gpus = ?, teacher = ?"
                " WHERE job_id = ? AND number = ?",
                (share.cpus, gpus, teacher, job.id, job.attempt),
            )
            self.write(job.id, change)
        self._on_change(job.id)
        return self.job(job.id)

    def attempt(self, job: Job) -> Attempt:
        """Return the job's newest attempt."""
        row = self._db.execute(
            "SELECT number, retries, from_step, seen_step, waiting_since, waits_for FROM attempts"
            " WHERE job_id = ? AND number = ?",
            (job.id, job.attempt),
        ).fetchone()
        return Attempt(**row)

    def waiting_jobs(self) -> Sequence[Job]:
        """Return the QUEUED jobs that wait for a teacher or another service."""
        rows = self._db.execute(
            "SELECT jobs.* FROM jobs INDEXED BY jobs_by_state JOIN attempts"
            " ON job_id = id AND attempts.number = attempt WHERE state = ? AND waits_for != ''",
            (JobState.QUEUED,),
        )
        return [job_of(row) for row in rows]

    def has_progressed(self, job: Job) -> bool:
        """Return True if the newest attempt made a step that no earlier attempt has made."""
        row = self._db.execute(
            "SELECT coalesce(max(CASE WHEN number = :now THEN seen_step END), -1)"
            " > coalesce(max(CASE WHEN number < :now THEN seen_step END), -1) AS more"
            " FROM attempts WHERE job_id = :id",
            {"id": job.id, "now": job.attempt},
        ).fetchone()
        return bool(row["more"])

    def now(self) -> float:
        """Return the current time of the clock for events, in Unix seconds."""
        return self._now()

    def events(self, job_id: str, after_seq: int, limit: int) -> Sequence[JobEvent]:
        """Return up to `limit` events of a job with `seq` above `after_seq`, in order."""
        rows = self._db.execute(
            f"SELECT {_EVENT_FIELDS} FROM events WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?",
            (job_id, after_seq, limit),
        )
        return [JobEvent(**parse_row(row)) for row in rows]

    def extremes(self, job_id: str) -> Extremes:
        """Return the extreme values of the metrics in the events of a job that were deleted."""
        return read_extremes(self._db, job_id)

    def evaluations(
        self, job_id: str, metrics: Sequence[str], after_seq: int = 0
    ) -> Sequence[JobEvent]:
        """Return the events with `seq` above `after_seq` that have one of these metrics, in order.

        The events have no other metrics: SQLite extracts the values, so that the time does not
        depend on the number of metrics.
        """
        columns = _EVENT_FIELDS.removesuffix("metrics")
        values = ", ".join("?, json_extract(metrics, ?)" for _ in metrics)
        rows = self._db.execute(
            f"SELECT {columns} json_object({values}) AS metrics FROM events"
            " WHERE job_id = ? AND seq > ? AND instr(metrics, '\"eval/') ORDER BY seq",
            (*(text for name in metrics for text in (name, f'$."{name}"')), job_id, after_seq),
        )
        events = []
        for row in rows:
            fields = parse_row(row)
            fields["metrics"] = {
                name: value for name, value in fields["metrics"].items() if value is not None
            }
            if fields["metrics"]:
                events.append(JobEvent(**fields))
        return events

    def sampled_steps(self, job: Job, count: int) -> Sequence[JobEvent]:
        """Return up to `count` events of steps, evenly spaced over the events of a job."""
        query = (
            f"SELECT {_EVENT_FIELDS} FROM events"
            " WHERE job_id = ? AND seq >= ? AND metrics != '{}' ORDER BY seq LIMIT 1"
        )
        events: dict[int, JobEvent] = {}
        for number in range(count):
            first_seq = 1 + number * job.last_seq // count
            if row := self._db.execute(query, (job.id, first_seq)).fetchone():
                events.setdefault(row["seq"], JobEvent(**parse_row(row)))
        return list(events.values())

    def change(self, job_id: str, *changes: Change) -> Job:
        """Apply the changes in order in one transaction, each with its event.

        A change that only sets the phase that the job already has is skipped. If one change raises
        WrongState, no change is applied.
        """
        with transaction(self._db):
            for change in changes:
                if not change.is_phase_of(self.job(job_id)):
                    self.write(job_id, change)
        self._on_change(job_id)
        return self.job(job_id)

    def queue_again(
        self,
        job_id: str,
        attempt: Attempt,
        change: Change,
        *,
        at_end: bool,
        config: AnyJob | None = None,
    ) -> Job:
        """Queue a new attempt of a job.

        With `at_end`, the job is placed at the end of the queue; otherwise it keeps its old place.
        `config`, if given, replaces the job's configuration.
        """
        with transaction(self._db):
            self.next_attempt(job_id, attempt)
            if at_end:
                place = self._next_place()
                self._db.execute("UPDATE jobs SET place = ? WHERE id = ?", (place, job_id))
            if config is not None:
                self._db.execute(
                    "UPDATE jobs SET config_json = ?, max_steps = ?, priority = ? WHERE id = ?",
                    (config.model_dump_json(), config.max_steps, config.priority, job_id),
                )
            self.write(job_id, change)
        self._on_change(job_id)
        return self.job(job_id)

    def write(self, job_id: str, change: Change) -> None:
        """Apply one change to a job's row and insert its event; all state changes use this method.

        The caller opens the transaction.
        """
        job = self.job(job_id)
        state = change.state or job.state
        if change.state is not None and (job.state, state) not in TRANSITIONS:
            raise WrongState(f"job {job_id} is {job.state} and cannot become {state}")
        self.dependencies.is_changed |= job.last_seq == 0 or state is not job.state
        self.tally.ends[state] += state in TERMINAL and state is not job.state
        now = max(self._now(), self._newest_time(job))
        values: dict[str, Any] = {
            "state": state,
            "reason": job.reason if change.reason is None else change.reason[:_REASON_CHARS],
            "phase": job.phase if change.phase is None else change.phase[:PHASE_CHARS],
            "step": job.step if change.step is None else change.step,
            "max_steps": job.max_steps if change.max_steps is None else change.max_steps,
            "metrics": json.dumps(dict(job.metrics if change.metrics is None else change.metrics)),
            "started_at": job.started_at or (now if state is JobState.PREPARING else 0.0),
            "ended_at": now if state in TERMINAL else 0.0,
            "last_seq": job.last_seq + 1,
        }
        assignments = ", ".join(f"{name} = :{name}" for name in values)
        self._db.execute(f"UPDATE jobs SET {assignments} WHERE id = :id", {**values, "id": job_id})
        if state is JobState.QUEUED and job.state is not JobState.QUEUED:
            self._db.execute("UPDATE jobs SET queued_at = ? WHERE id = ?", (now, job_id))
        if change.metrics is not None:
            self._db.execute(
                "UPDATE attempts SET seen_step = ? WHERE job_id = ? AND number = ?",
                (values["step"], job_id, job.attempt),
            )
        self._db.execute(
            f"INSERT INTO events (job_id, {_EVENT_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(job_id, values["last_seq"], now, state, values["reason"], values["phase"]),
                *(job.attempt, values["step"], values["max_steps"]),
                json.dumps(dict(change.metrics or {})),
            ),
        )
        thin_events(self._db, job_id, values["last_seq"])

    def next_attempt(self, job_id: str, attempt: Attempt) -> None:
        """Insert an attempt of a job as its newest; the caller opens the transaction."""
        self._db.execute("UPDATE jobs SET attempt = ? WHERE id = ?", (attempt.number, job_id))
        self._insert_attempt(job_id, attempt)

    def _insert_attempt(self, job_id: str, attempt: Attempt) -> None:
        self.tally.attempts += 1
        self.tally.retries += attempt.retries > 0
        self._db.execute(
            "INSERT INTO attempts (job_id, number, retries, from_step, seen_step, waiting_since,"
            " waits_for) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job_id, *asdict(attempt).values()),
        )

    def _newest_time(self, job: Job) -> float:
        """Return the time of the job's last event. No later event gets an earlier time."""
        row = self._db.execute(
            "SELECT time FROM events WHERE job_id = ? AND seq = ?", (job.id, job.last_seq)
        ).fetchone()
        return row["time"] if row is not None else job.created_at

    def _next_place(self) -> int:
        row = self._db.execute("SELECT coalesce(max(place), 0) + 1 FROM jobs").fetchone()
        return int(row[0])
