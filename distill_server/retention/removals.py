"""Removes ended jobs: first from the database, then their run directories.

A job is removed for all users when its rows are deleted. The same transaction writes the job's id
to the table `removals`; the id stays there until the files are deleted. If the server is killed
before the files are deleted, the next server deletes the files. No new job can use an id of the
table.
"""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from clients.jobs.job import TERMINAL, Job
from distill_server.jobs.database import transaction
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from protos.errors import Unavailable, WrongState
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)

_ENDED = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
# The condition of `expired` on a job.
_OVER = f"state IN ({_ENDED}) AND max(ended_at, imported_at) < :before"
# In an order that foreign keys allow: rows that refer to other rows are deleted first.
_DELETIONS = (
    "DELETE FROM events WHERE job_id = :id",
    "DELETE FROM extremes WHERE job_id = :id",
    "DELETE FROM attempts WHERE job_id = :id",
    "DELETE FROM submissions WHERE job_id = :id",
    "DELETE FROM dependencies WHERE :id IN (job_id, before_id)",
    "DELETE FROM jobs WHERE id = :id",
)


class Removals:
    """Pins and removes jobs. Call all methods on the event loop."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        store: JobStore,
        runs: Path,
        files: RunFiles,
        on_change: Callable[[str], None],
    ) -> None:
        """`on_change` is called with the id of each job that was pinned or removed."""
        self._db = connection
        self._store = store
        self._runs = runs
        self._files = files
        self._on_change = on_change
        # Called when there are files to delete.
        self.wake: Callable[[], None] = lambda: None

    def pin(self, text: str, *, pinned: bool) -> Job:
        """Pin a job, so that it is never removed, or unpin it. Raises NotFound."""
        job = self._store.resolve(text)
        with transaction(self._db):
            self._db.execute("UPDATE jobs SET pinned = ? WHERE id = ?", (pinned, job.id))
        self._on_change(job.id)
        return self._store.job(job.id)

    def remove(self, text: str) -> Job:
        """Remove an ended job with its events and keys; its files are deleted later.

        Returns the removed job. Raises NotFound if there is no such job, WrongState if the job has
        not ended, is pinned, or is needed by a job that has not ended, and Unavailable if the
        database cannot be written.
        """
        job = self._store.resolve(text)
        if job.state not in TERMINAL:
            raise WrongState(
                f"job {job.id} is {job.state} and cannot be removed",
                field="job_id",
                hint="cancel the job, and remove it after its end",
            )
        if job.pinned:
            raise WrongState(
                f"job {job.id} is pinned", field="job_id", hint=f"distill pin --off {job.id}"
            )
        dependent = self._db.execute(
            "SELECT id, state FROM dependencies JOIN jobs ON id = job_id"
            f" WHERE before_id = ? AND state NOT IN ({_ENDED}) ORDER BY number LIMIT 1",
            (job.id,),
        ).fetchone()
        if dependent is not None:
            raise WrongState(
                f"job {job.id} is needed by job {dependent['id']}, which is {dependent['state']}",
                field="job_id",
                hint="cancel that job, or wait until it has ended",
            )
        with transaction(self._db):
            self._db.execute("INSERT INTO removals VALUES (?)", (job.id,))
            for deletion in _DELETIONS:
                self._db.execute(deletion, {"id": job.id})
        failpoint("removal-stored")
        # A dependent job may have waited only for the removed job.
        self._store.dependencies.is_changed = True
        self._on_change(job.id)
        self.wake()
        return job

    def list_expired(self, cutoff: float, limit: int) -> Sequence[str]:
        """Return the ids of up to `limit` jobs that ended before the Unix time `cutoff`.

        The oldest job is first. For an imported job, the time of the import is used in place of its
        end. Pinned jobs are left out. A job is also left out if another job depends on it and that
        job had not ended before `cutoff`.
        """
        rows = self._db.execute(
            f"SELECT id FROM jobs AS ended WHERE {_OVER} AND NOT pinned"
            " AND NOT EXISTS (SELECT 1 FROM dependencies JOIN jobs ON id = job_id"
            f" WHERE before_id = ended.id AND NOT ({_OVER}))"
            " ORDER BY ended_at LIMIT :limit",
            {"before": cutoff, "limit": limit},
        )
        return [row["id"] for row in rows]

    async def delete_files(self) -> None:
        """Delete the run directories of removed jobs, one after the other.

        Failures are logged, and the next call tries again.
        """
        for (job_id,) in self._db.execute("SELECT job_id FROM removals").fetchall():
            try:
                await self._files.start(partial(delete_run, self._runs, job_id))
            except (OSError, Unavailable) as error:
                log.warning("job %s: cannot delete its files: %s", job_id, error)
                continue
            failpoint("files-deleted")
            with transaction(self._db):
                self._db.execute("DELETE FROM removals WHERE job_id = ?", (job_id,))


def delete_run(runs: Path, job_id: str) -> None:
    """Delete the run directory of a job. Links are not followed: only files in `runs` are deleted.

    Nothing happens if the directory does not exist.
    """
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", job_id), "run_ids creates only such ids"
    path = runs / job_id
    with suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()  # a user moved the directory; only the link is deleted
        else:
            shutil.rmtree(path)
