"""The database table of the jobs that must succeed before another job starts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clients.jobs.job import JobState

# The prefix of a phase; the ids of the unfinished jobs follow the prefix.
_WAITING = "WAITING for "
_MAX_NAMED = 3
# An SQL condition on a row of `jobs`: every job that it depends on has succeeded.
ALL_MET = (
    "NOT EXISTS (SELECT 1 FROM dependencies JOIN jobs AS before ON before.id = before_id"
    f" WHERE job_id = jobs.id AND before.state != '{JobState.SUCCEEDED}')"
)


@dataclass(frozen=True)
class StaleJob:
    """A QUEUED job whose phase must be updated, or which can never start.

    - phase: the phase that the job must get.
    - reason: the reason why the job can never start; "" if the job can start later.
    """

    job_id: str
    phase: str
    reason: str


class Dependencies:
    """Reads and writes the table in the server's database; the caller opens transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        # Whether a job has changed its state since the result of `find_stale_jobs` was last
        # applied. That query takes 50 ms for ten thousand waiting jobs.
        self.is_changed = True

    def insert(self, job_id: str, dependencies: Iterable[str]) -> None:
        """Store the ids of the jobs that must succeed before a new job starts."""
        self._db.executemany(
            "INSERT INTO dependencies VALUES (?, ?)",
            [(job_id, dependency) for dependency in dependencies],
        )

    def read(self, job_ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Return the ids of the dependencies by job id; jobs without dependencies are left out."""
        rows = self._db.execute(
            "SELECT job_id, before_id FROM dependencies"
            " WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY job_id, before_id",
            (json.dumps(job_ids),),
        )
        dependencies: dict[str, list[str]] = {}
        for job_id, before_id in rows:
            dependencies.setdefault(job_id, []).append(before_id)
        return dependencies

    def explain_failure(self, job_id: str) -> str:
        """Return a sentence about the failed dependency that prevents the job's start, or ""."""
        row = self._db.execute(
            "SELECT id, state FROM dependencies JOIN jobs ON id = before_id"
            " WHERE job_id = ? AND state IN (?, ?) ORDER BY number LIMIT 1",
            (job_id, JobState.FAILED, JobState.CANCELLED),
        ).fetchone()
        return "" if row is None else format_failed_dependency(row["id"], JobState(row["state"]))

    def has_unmet(self, job_id: str) -> bool:
        """Return True if a dependency of the job has not succeeded."""
        row = self._db.execute(
            "SELECT 1 FROM dependencies JOIN jobs ON id = before_id"
            " WHERE job_id = ? AND state != ?",
            (job_id, JobState.SUCCEEDED),
        )
        return row.fetchone() is not None

    def pipeline_of(self, job_id: str, limit: int) -> Mapping[str, Sequence[str]]:
        """Return the jobs that are connected with a job by dependencies, at most `limit` jobs.

        The keys are the ids of these jobs, in order of submission. The value is the list of the ids
        of the job's dependencies. A job without dependencies and dependents is a pipeline of one
        job.
        """
        rows = self._db.execute(
            "WITH RECURSIVE part (id) AS (SELECT :job UNION"
            " SELECT iif(job_id = part.id, before_id, job_id) FROM part JOIN dependencies"
            " ON job_id = part.id OR before_id = part.id)"
            " SELECT listed.id, before_id FROM (SELECT id, number FROM part JOIN jobs USING (id)"
            " ORDER BY number LIMIT :limit) AS listed"
            " LEFT JOIN dependencies ON job_id = listed.id ORDER BY number",
            {"job": job_id, "limit": limit},
        )
        pipeline: dict[str, list[str]] = {}
        for part_id, before_id in rows:
            pipeline.setdefault(part_id, []).extend(filter(None, [before_id]))
        return pipeline

    def find_stale_jobs(self) -> Sequence[StaleJob]:
        """Return the QUEUED jobs whose phase or state must change."""
        rows = self._db.execute(
            "SELECT job_id, jobs.phase, before.id, before.state"
            " FROM dependencies JOIN jobs ON jobs.id = job_id"
            " JOIN jobs AS before ON before.id = before_id"
            f" WHERE jobs.state = ? AND (jobs.phase LIKE '{_WAITING}%' OR before.state != ?)"
            " ORDER BY job_id, before.number",
            (JobState.QUEUED, JobState.SUCCEEDED),
        )
        waiting_jobs: dict[str, tuple[str, list[tuple[str, JobState]]]] = {}
        for job_id, phase, dependency, state in rows:
            waiting_jobs.setdefault(job_id, (phase, []))[1].append((dependency, JobState(state)))
        judged_jobs = (
            (_judge_job(job_id, dependency), phase)
            for job_id, (phase, dependency) in waiting_jobs.items()
        )
        return [stale for stale, phase in judged_jobs if stale.reason or stale.phase != phase]


def format_failed_dependency(job_id: str, state: JobState) -> str:
    """Return why a job cannot start after the job `job_id`, which is FAILED or CANCELLED."""
    return f"job {job_id}, which must succeed first, is {state}"


def _judge_job(job_id: str, dependencies: Sequence[tuple[str, JobState]]) -> StaleJob:
    for dependency, state in dependencies:
        if state in (JobState.FAILED, JobState.CANCELLED):
            return StaleJob(job_id, "", format_failed_dependency(dependency, state))
    unmet_ids = [
        dependency for dependency, state in dependencies if state is not JobState.SUCCEEDED
    ]
    suffix = f" and {len(unmet_ids) - _MAX_NAMED} more" if len(unmet_ids) > _MAX_NAMED else ""
    listed_ids = ", ".join(unmet_ids[:_MAX_NAMED])
    return StaleJob(job_id, f"{_WAITING}{listed_ids}{suffix}" if unmet_ids else "", "")
