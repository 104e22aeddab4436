"""The database table of the jobs that must succeed before another one starts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clients.jobs.job import JobState

# The start of a phase, with the ids of the jobs after it.
_WAITING = "WAITING for "
_MOST_NAMED = 3
# A condition on a row of `jobs`: every job that it comes after has succeeded.
MET = (
    "NOT EXISTS (SELECT 1 FROM dependencies JOIN jobs AS before ON before.id = before_id"
    f" WHERE job_id = jobs.id AND before.state != '{JobState.SUCCEEDED}')"
)


@dataclass(frozen=True)
class Stale:
    """A QUEUED job whose phase is not true any more, or that cannot start.

    `phase` is the true one. `reason` is why the job cannot start; "" if it waits or can start.
    """

    job_id: str
    phase: str
    reason: str


class Dependencies:
    """Reads and writes the table in the server's database; the caller opens transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        # Whether a job has changed its state since `stale` was last obeyed. It takes 50 ms to ask
        # for ten thousand jobs that wait.
        self.changed = True

    def insert(self, job_id: str, before: Iterable[str]) -> None:
        """Store the ids of the jobs that must succeed before a new job starts."""
        self._db.executemany(
            "INSERT INTO dependencies VALUES (?, ?)", [(job_id, other) for other in before]
        )

    def failed(self, job_id: str) -> str:
        """Return why the job cannot start: a job before it has failed; "" if none has."""
        found = self._db.execute(
            "SELECT id, state FROM dependencies JOIN jobs ON id = before_id"
            " WHERE job_id = ? AND state IN (?, ?) ORDER BY number LIMIT 1",
            (job_id, JobState.FAILED, JobState.CANCELLED),
        ).fetchone()
        return "" if found is None else ended_badly(found["id"], JobState(found["state"]))

    def unmet(self, job_id: str) -> bool:
        """Return True if a job before this one has not succeeded."""
        found = self._db.execute(
            "SELECT 1 FROM dependencies JOIN jobs ON id = before_id"
            " WHERE job_id = ? AND state != ?",
            (job_id, JobState.SUCCEEDED),
        )
        return found.fetchone() is not None

    def stale(self) -> Sequence[Stale]:
        """Return the QUEUED jobs whose phase or state must change."""
        rows = self._db.execute(
            "SELECT job_id, jobs.phase, before.id, before.state"
            " FROM dependencies JOIN jobs ON jobs.id = job_id"
            " JOIN jobs AS before ON before.id = before_id"
            f" WHERE jobs.state = ? AND (jobs.phase LIKE '{_WAITING}%' OR before.state != ?)"
            " ORDER BY job_id, before.number",
            (JobState.QUEUED, JobState.SUCCEEDED),
        )
        waits: dict[str, tuple[str, list[tuple[str, JobState]]]] = {}
        for job_id, phase, before, state in rows:
            waits.setdefault(job_id, (phase, []))[1].append((before, JobState(state)))
        judged = ((_judged(job_id, before), phase) for job_id, (phase, before) in waits.items())
        return [stale for stale, phase in judged if stale.reason or stale.phase != phase]


def ended_badly(job_id: str, state: JobState) -> str:
    """Return why a job cannot start after the job `job_id`, which is FAILED or CANCELLED."""
    return f"job {job_id}, which must succeed first, is {state}"


def _judged(job_id: str, before: Sequence[tuple[str, JobState]]) -> Stale:
    for other, state in before:
        if state in (JobState.FAILED, JobState.CANCELLED):
            return Stale(job_id, "", ended_badly(other, state))
    unmet = [other for other, state in before if state is not JobState.SUCCEEDED]
    more = f" and {len(unmet) - _MOST_NAMED} more" if len(unmet) > _MOST_NAMED else ""
    named = ", ".join(unmet[:_MOST_NAMED])
    return Stale(job_id, f"{_WAITING}{named}{more}" if unmet else "", "")
