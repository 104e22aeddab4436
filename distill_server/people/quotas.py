"""Quotas: how many jobs of an owner run at once, and how many GPUs they hold.

A job above the quota of its owner waits, and so do the owner's jobs behind it: small ones do not
delay a large one for ever. Jobs of other owners pass.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from clients.jobs.job import Job
from distill_server.jobs.store import ACTIVE, Change, JobStore
from protos.auth.owners import Quota
from protos.errors import InvalidInput

# The start of the phase of a job that waits for its owner's quota.
_WAITING = "WAITING quota: "
# Jobs that are told in one pass: each is a write of about 0.4 ms on the event loop.
_MOST_TOLD = 50


@dataclass
class _Held:
    jobs: int = 0
    gpus: int = 0


class Quotas:
    """Decides which owners may start a further job. Call all methods on the event loop."""

    def __init__(
        self, connection: sqlite3.Connection, store: JobStore, quotas: Mapping[str, Quota]
    ) -> None:
        """`quotas` by the name of the owner; others have none."""
        self._db = connection
        self._store = store
        self._quotas = quotas
        self._held: dict[str, _Held] = {}
        # Owners with a job above their quota, and the jobs' phase, as of the last pass.
        self._above: dict[str, str] = {}
        self._seen: tuple[object, ...] = ()

    def begin_pass(self) -> None:
        """Count what the active jobs hold, and tell the jobs that wait for a quota."""
        if not self._quotas:
            return
        held: dict[str, _Held] = {}
        for owner, gpus in self._active():
            one = held.setdefault(owner, _Held())
            one.jobs += 1
            one.gpus += len(list(filter(None, (gpus or "").split(","))))
        # An owner stays above the quota until a job starts, ends or is queued.
        tally = self._store.tally
        seen = (held, tally.attempts, tally.ends.total())
        if seen != self._seen:
            self._above, self._seen = {}, seen
        self._held = {owner: _Held(one.jobs, one.gpus) for owner, one in held.items()}
        for owner in self._quotas:
            if phase := self._lack(owner, 0):
                self._above[owner] = phase
        self._tell()

    def _active(self) -> sqlite3.Cursor:
        marks = ", ".join("?" * len(ACTIVE))
        return self._db.execute(
            "SELECT owner, gpus FROM jobs INDEXED BY jobs_by_state JOIN attempts"
            f" ON job_id = id AND attempts.number = attempt WHERE state IN ({marks})",
            ACTIVE,
        )

    def others(self) -> str:
        """Return an SQL condition on `jobs`: not of an owner who is known to be above the quota."""
        names = ", ".join(f"'{owner}'" for owner in sorted(self._above))
        return f"owner NOT IN ({names})" if names else "1"

    def lack(self, job: Job, gpus: int) -> str:
        """Return the phase of a job that must wait for its owner's quota; "" if it need not.

        `gpus`: what the job would hold.
        """
        owner = job.owner
        if owner not in self._quotas:
            return ""
        if owner not in self._above and (phase := self._lack(owner, gpus)):
            self._above[owner] = phase
        return self._above.get(owner, "")

    def take(self, job: Job, gpus: int) -> None:
        """Count a job that starts in this pass."""
        one = self._held.setdefault(job.owner, _Held())
        one.jobs += 1
        one.gpus += gpus

    def _tell(self) -> None:
        for owner, phase in self._above.items():
            rows = self._db.execute(
                "SELECT id FROM jobs INDEXED BY jobs_untold"
                " WHERE state = 'QUEUED' AND phase = '' AND owner = ? LIMIT ?",
                (owner, _MOST_TOLD),
            ).fetchall()
            for row in rows:
                self._store.change(row["id"], Change(phase=phase))

    def _lack(self, owner: str, gpus: int) -> str:
        """Return the phase of a job with so many GPUs if it would be above the quota; else ""."""
        quota, held = self._quotas[owner], self._held.get(owner, _Held())
        if quota.jobs is not None and held.jobs >= quota.jobs:
            return f"{_WAITING}{owner} may run {_counted(quota.jobs, 'job')} at once"
        if quota.gpus is not None and held.gpus + gpus > quota.gpus:
            return f"{_WAITING}{owner} may hold {_counted(quota.gpus, 'GPU')} at once"
        return ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def require_counted_gpus(quotas: Mapping[str, Quota], counted: bool) -> None:
    """Raise InvalidInput if there is a quota of GPUs, and the server does not count them."""
    for owner, quota in quotas.items():
        if quota.gpus is not None and not counted:
            raise InvalidInput(
                f"owner {owner} has a quota of GPUs, and the server does not divide its GPUs",
                field="--gpus",
                hint="start the server with --gpus, or leave gpus=N out of the token file",
            )
