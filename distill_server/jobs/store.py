"""Jobs, their attempts and their events. Every change of a job goes through `Store.change`.

All calls are short (a durable write takes about 0.4 ms), so the server makes them on its event
loop; nothing else ever runs between two statements of one call.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from clients.config.kinds import AnyJob, parse_job
from clients.jobs.job import TERMINAL, TRANSITIONS, Job, JobEvent, JobState
from distill_server.jobs.database import transaction
from distill_server.jobs.steady_clock import steady_clock
from distill_server.runners.machine import Share
from protos.errors import InvalidInput, NotFound, WrongState

_CANDIDATES_SHOWN = 10
ACTIVE = (JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING)
# A page of jobs must fit into one message.
_REASON_CHARS, _PHASE_CHARS = 2000, 200
_EVENT_FIELDS = "seq, time, state, reason, phase, attempt, step, max_steps, metrics"


@dataclass(frozen=True)
class Attempt:
    """One run of the trainer. `retries`: automatic ones since a person asked for an attempt."""

    number: int
    retries: int = 0
    from_step: int | None = None
    # Newest step whose metrics are among the job's events.
    seen_step: int = -1


@dataclass(frozen=True)
class Change:
    """What becomes of a job, and one event of it. None: as before; `metrics` are of `step`,
    `max_steps` of a job that does not say it itself.
    """

    state: JobState | None = None
    reason: str | None = None
    phase: str | None = None
    step: int | None = None
    max_steps: int | None = None
    metrics: Mapping[str, float] | None = None


class Store:
    """The tables behind an open database (`database.open_database`).

    `on_change` is called with a job's id after every change of it that is on disk; `now` gives the
    times of events, in Unix seconds.
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

    def submitted(self, idempotency_key: str, config: AnyJob) -> Job | None:
        """The job that was submitted under this key; raises InvalidInput if it was another one."""
        row = self._db.execute(
            "SELECT * FROM submissions WHERE idempotency_key = ?", (idempotency_key,)
        ).fetchone()
        if row is None:
            return None
        job = self.job(row["job_id"])
        if row["config_sha256"] != _digest(config) and not _means(job.config_json, config):
            raise InvalidInput(
                f"this key was used to submit another job, {job.id}",
                field="idempotency_key",
                hint="use a new key for a new job",
            )
        return job

    def add(self, job_id: str, config: AnyJob, idempotency_key: str) -> Job:
        """Put a new job at the end of the queue; an empty key is none."""
        config_json = config.model_dump_json()
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO jobs (id, name, kind, config_json, state, reason, phase, attempt,"
                " step, max_steps, metrics, created_at, started_at, ended_at, last_seq, place,"
                " priority) VALUES (?, ?, ?, ?, ?, '', '', 1, 0, ?, '{}', ?, 0, 0, 0, ?, ?)",
                (
                    *(job_id, config.name, config.method.type, config_json, JobState.QUEUED),
                    *(config.max_steps, self._now(), self._last_place(), config.priority),
                ),
            )
            self._insert_attempt(job_id, Attempt(1))
            if idempotency_key:
                self._db.execute(
                    "INSERT INTO submissions VALUES (?, ?, ?)",
                    (idempotency_key, job_id, _digest(config)),
                )
            self._write(job_id, Change())
        self._on_change(job_id)
        return self.job(job_id)

    def job(self, job_id: str) -> Job:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise NotFound(f"no job {job_id!r}", field="job_id", hint="distill ls shows all jobs")
        return _job_of(row)

    def has(self, job_id: str) -> bool:
        found = self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return found is not None

    def resolve(self, text: str) -> Job:
        """The job by its id, an unambiguous beginning of it, or `@last`.

        Raises NotFound, or InvalidInput naming the candidates.
        """
        if text == "@last":
            newest = self.page(limit=1)
            if not newest:
                raise NotFound("there are no jobs yet", field="job_id")
            return newest[0]
        if not text or self.has(text):
            return self.job(text)
        # Ids are of a-z, 0-9, "." and "-", all of which sort before "~".
        found = self._db.execute(
            "SELECT id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (text, text + "~", _CANDIDATES_SHOWN + 1),
        ).fetchall()
        if len(found) > 1:
            names = [row["id"] for row in found[:_CANDIDATES_SHOWN]]
            more = ", ..." if len(found) > _CANDIDATES_SHOWN else ""
            raise InvalidInput(
                f"{text!r} could be {', '.join(names)}{more}",
                field="job_id",
                hint="type more of it",
            )
        return self.job(found[0]["id"] if found else text)

    def page(
        self, *, state: JobState | None = None, limit: int, before_id: str = "", search: str = ""
    ) -> list[Job]:
        """Jobs from the newest on, those submitted before `before_id` only; and only those whose
        id, name and state have every word of `search` in them.
        """
        found, words = _having(search)
        rows = self._db.execute(
            f"SELECT * FROM jobs WHERE {found} AND (:state IS NULL OR state = :state) AND"
            " (:before = '' OR number < (SELECT number FROM jobs WHERE id = :before))"
            " ORDER BY number DESC LIMIT :limit",
            {"state": state, "before": before_id, "limit": limit, **words},
        )
        return [_job_of(row) for row in rows]

    def counts(self, search: str = "") -> dict[JobState, int]:
        """How many jobs are in each state, of those that a page finds; all seven are there."""
        having, words = _having(search)
        rows = self._db.execute(
            f"SELECT state, count(*) FROM jobs WHERE {having} GROUP BY state", words
        )
        found = {JobState(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in JobState}

    def attempt_counts(self) -> tuple[int, int]:
        """Of all jobs: attempts, and those among them that followed a trainer's death."""
        row = self._db.execute("SELECT count(*), total(retries > 0) FROM attempts").fetchone()
        return row[0], int(row[1])

    def in_state(self, *states: JobState, limit: int = -1) -> Sequence[Job]:
        """Jobs in the order of the queue: by priority, then first come, first served."""
        marks = ", ".join("?" * len(states))
        rows = self._db.execute(
            f"SELECT * FROM jobs INDEXED BY jobs_by_state WHERE state IN ({marks})"
            " ORDER BY priority DESC, place LIMIT ?",
            (*states, limit),
        )
        return [_job_of(row) for row in rows]

    def queue_length(self) -> int:
        found = self._db.execute(
            "SELECT count(*) FROM jobs INDEXED BY jobs_by_state WHERE state = ?", (JobState.QUEUED,)
        )
        length: int = found.fetchone()[0]
        return length

    def held(self) -> Sequence[Share]:
        """What the active jobs hold of the machine."""
        marks = ", ".join("?" * len(ACTIVE))
        rows = self._db.execute(
            "SELECT cpus, gpus FROM jobs INDEXED BY jobs_by_state JOIN attempts"
            f" ON job_id = id AND attempts.number = attempt WHERE state IN ({marks})",
            ACTIVE,
        )
        return [_share_of(row) for row in rows]

    def begin(self, job: Job, share: Share, change: Change) -> Job:
        """Give the newest attempt its share of the machine; `change` makes the job active."""
        gpus = None if share.gpus is None else ",".join(share.gpus)
        with transaction(self._db):
            self._db.execute(
                "UPDATE attempts SET cpus = ?, gpus = ? WHERE job_id = ? AND number = ?",
                (share.cpus, gpus, job.id, job.attempt),
            )
            self._write(job.id, change)
        self._on_change(job.id)
        return self.job(job.id)

    def attempt(self, job: Job) -> Attempt:
        """The job's newest attempt."""
        row = self._db.execute(
            "SELECT number, retries, from_step, seen_step FROM attempts"
            " WHERE job_id = ? AND number = ?",
            (job.id, job.attempt),
        ).fetchone()
        return Attempt(**row)

    def events(self, job_id: str, after_seq: int, limit: int) -> Sequence[JobEvent]:
        rows = self._db.execute(
            f"SELECT {_EVENT_FIELDS} FROM events WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?",
            (job_id, after_seq, limit),
        )
        return [JobEvent(**_typed(row)) for row in rows]

    def change(self, job_id: str, *changes: Change) -> Job:
        """Apply the changes in order, each with its event, all or nothing.

        Raises WrongState for a transition that clients.jobs.job.TRANSITIONS does not have.
        """
        with transaction(self._db):
            for change in changes:
                self._write(job_id, change)
        self._on_change(job_id)
        return self.job(job_id)

    def queue_again(
        self,
        job_id: str,
        attempt: Attempt,
        change: Change,
        *,
        last: bool,
        config: AnyJob | None = None,
    ) -> Job:
        """A further attempt, in the job's old place of the queue or as its last.

        `config` replaces the job's.
        """
        with transaction(self._db):
            self._db.execute("UPDATE jobs SET attempt = ? WHERE id = ?", (attempt.number, job_id))
            self._insert_attempt(job_id, attempt)
            if last:
                place = self._last_place()
                self._db.execute("UPDATE jobs SET place = ? WHERE id = ?", (place, job_id))
            if config is not None:
                self._db.execute(
                    "UPDATE jobs SET config_json = ?, max_steps = ?, priority = ? WHERE id = ?",
                    (config.model_dump_json(), config.max_steps, config.priority, job_id),
                )
            self._write(job_id, change)
        self._on_change(job_id)
        return self.job(job_id)

    def _write(self, job_id: str, change: Change) -> None:
        """The only place where a job's row changes and an event is made."""
        job = self.job(job_id)
        state = change.state or job.state
        if change.state is not None and (job.state, state) not in TRANSITIONS:
            raise WrongState(f"job {job_id} is {job.state} and cannot become {state}")
        now = max(self._now(), self._newest_time(job))
        values: dict[str, Any] = {
            "state": state,
            "reason": job.reason if change.reason is None else change.reason[:_REASON_CHARS],
            "phase": job.phase if change.phase is None else change.phase[:_PHASE_CHARS],
            "step": job.step if change.step is None else change.step,
            "max_steps": job.max_steps if change.max_steps is None else change.max_steps,
            "metrics": json.dumps(dict(job.metrics if change.metrics is None else change.metrics)),
            "started_at": job.started_at or (now if state is JobState.PREPARING else 0.0),
            "ended_at": now if state in TERMINAL else 0.0,
            "last_seq": job.last_seq + 1,
        }
        assignments = ", ".join(f"{name} = :{name}" for name in values)
        self._db.execute(f"UPDATE jobs SET {assignments} WHERE id = :id", {**values, "id": job_id})
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

    def _insert_attempt(self, job_id: str, attempt: Attempt) -> None:
        self._db.execute(
            "INSERT INTO attempts (job_id, number, retries, from_step, seen_step)"
            " VALUES (?, ?, ?, ?, ?)",
            (job_id, attempt.number, attempt.retries, attempt.from_step, attempt.seen_step),
        )

    def _newest_time(self, job: Job) -> float:
        """Time never goes back within a job, not even when the clock did while no server ran."""
        found = self._db.execute(
            "SELECT time FROM events WHERE job_id = ? AND seq = ?", (job.id, job.last_seq)
        ).fetchone()
        return found["time"] if found is not None else job.created_at

    def _last_place(self) -> int:
        place: int = self._db.execute("SELECT coalesce(max(place), 0) + 1 FROM jobs").fetchone()[0]
        return place


def _having(search: str) -> tuple[str, dict[str, str]]:
    """A condition on jobs, and its values; both cases of ASCII are one."""
    words = {f"word{number}": word for number, word in enumerate(search.split())}
    text = "lower(id || ' ' || name || ' ' || state)"
    return " AND ".join(["1", *(f"instr({text}, lower(:{name}))" for name in words)]), words


def _job_of(row: sqlite3.Row) -> Job:
    values = _typed(row)
    del values["number"], values["place"], values["priority"]
    return Job(**values)


def _share_of(row: sqlite3.Row) -> Share:
    gpus = row["gpus"]
    return Share(row["cpus"], None if gpus is None else tuple(filter(None, gpus.split(","))))


def _typed(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(row)
    return {
        **values,
        "state": JobState(values["state"]),
        "metrics": json.loads(values["metrics"]),
    }


def _digest(config: AnyJob) -> str:
    """Of what the job says itself: a server with more keys than this one makes the same of it."""
    return sha256(config.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def _means(config_json: str, config: AnyJob) -> bool:
    """Whether the text is of this job, whatever keys there were when it was written. Digests were
    once of every key, so an upgrade changed them.
    """
    try:
        return parse_job(config_json) == config
    except ValidationError:
        return False
