"""Quotas: limits for an owner's running jobs and their GPUs.

A job above the quota of its owner waits. Later jobs of the same owner also wait, so that small jobs
cannot delay a large job forever. Jobs of other owners are not blocked.

A job is refused if it alone needs more GPUs than the quota. If the quota was lowered after the
submission of such a job, the job waits and does not block other jobs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clients.jobs.job import Job
from distill_server.jobs.store import ACTIVE, Change, JobStore
from distill_server.runners.machine import format_count
from protos.auth.owners import Quota
from protos.errors import InvalidInput

# The start of the phase of a job that waits for its owner's quota.
_WAITING = "WAITING quota: "
# The largest number of phases written in one pass: each takes about 0.4 ms on the event loop.
_MAX_PHASES = 50


@dataclass
class _Usage:
    jobs: int = 0
    gpus: int = 0


class Quotas:
    """Decides which owners may start a further job. Call all methods on the event loop."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        store: JobStore,
        read_quotas: Callable[[], Mapping[str, Quota]],
    ) -> None:
        """`read_quotas` returns the current quotas by owner. Other owners have no quota."""
        self._db = connection
        self._store = store
        self._read_quotas = read_quotas
        self._quotas: Mapping[str, Quota] = {}
        self._usage_by_owner: dict[str, _Usage] = {}
        # The owners with a job above their quota in the last pass, and the phase of these jobs.
        self._phase_by_owner: dict[str, str] = {}
        self._last_counters: tuple[object, ...] = ()

    def begin_pass(self) -> None:
        """Count the shares of the active jobs, and set the phase of jobs that wait for a quota."""
        if (quotas := self._read_quotas()) != self._quotas:
            self._quotas, self._phase_by_owner, self._last_counters = quotas, {}, ()
        if not self._quotas:
            return
        usage_by_owner: dict[str, _Usage] = {}
        for owner, gpus in self._select_active():
            usage = usage_by_owner.setdefault(owner, _Usage())
            usage.jobs += 1
            usage.gpus += len(list(filter(None, (gpus or "").split(","))))
        # An owner stays above the quota until a job starts, ends or is queued.
        tally = self._store.tally
        counters = (usage_by_owner, tally.attempts, tally.ends.total())
        if counters != self._last_counters:
            self._phase_by_owner, self._last_counters = {}, counters
        self._usage_by_owner = {
            owner: _Usage(usage.jobs, usage.gpus) for owner, usage in usage_by_owner.items()
        }
        for owner in self._quotas:
            if phase := self._format_lack(owner, 0):
                self._phase_by_owner[owner] = phase
        self._write_phases()

    def _select_active(self) -> sqlite3.Cursor:
        marks = ", ".join("?" * len(ACTIVE))
        return self._db.execute(
            "SELECT owner, gpus FROM jobs INDEXED BY jobs_by_state JOIN attempts"
            f" ON job_id = id AND attempts.number = attempt WHERE state IN ({marks})",
            ACTIVE,
        )

    def other_owners(self) -> str:
        """Return an SQL condition that selects the jobs that quotas may let start.

        It excludes the jobs of owners whose next job is known to exceed their quota.
        """
        names = ", ".join(f"'{owner}'" for owner in sorted(self._phase_by_owner))
        return f"owner NOT IN ({names})" if names else "1"

    def require_gpus(self, owner: str, gpus: int) -> None:
        """Raise InvalidInput if `gpus` GPUs of one job are more than the quota of its owner."""
        quota = self._read_quotas().get(owner, Quota())
        if excess := _explain_excess(owner, quota, gpus):
            raise InvalidInput(
                excess,
                field="resources.gpus",
                hint="request fewer GPUs, or ask who runs the server for a larger quota",
            )

    def explain_wait(self, job: Job, gpus: int) -> str:
        """Return a text that says why the job must wait for its owner's quota.

        The text is shown to users as the phase of the job. It is "" if the quota lets the job
        start. `gpus` is the number of GPUs that the job would hold.
        """
        owner = job.owner
        if owner not in self._quotas:
            return ""
        if excess := _explain_excess(owner, self._quotas[owner], gpus):
            return f"{_WAITING}{excess}"
        if owner not in self._phase_by_owner and (phase := self._format_lack(owner, gpus)):
            self._phase_by_owner[owner] = phase
        return self._phase_by_owner.get(owner, "")

    def count_start(self, job: Job, gpus: int) -> None:
        """Add a job that is about to start, and its GPUs, to the usage of its owner.

        So the quota also counts this job for later jobs of the same scheduling pass.
        """
        usage = self._usage_by_owner.setdefault(job.owner, _Usage())
        usage.jobs += 1
        usage.gpus += gpus

    def _write_phases(self) -> None:
        for owner, phase in self._phase_by_owner.items():
            rows = self._db.execute(
                "SELECT id FROM jobs INDEXED BY jobs_untold"
                " WHERE state = 'QUEUED' AND phase = '' AND owner = ? LIMIT ?",
                (owner, _MAX_PHASES),
            ).fetchall()
            for row in rows:
                self._store.change(row["id"], Change(phase=phase))

    def _format_lack(self, owner: str, gpus: int) -> str:
        """Return the phase of a job that must wait for the quota; "" if the quota lets it start.

        `gpus` is the number of GPUs of the job.
        """
        quota, usage = self._quotas[owner], self._usage_by_owner.get(owner, _Usage())
        if quota.jobs is not None and usage.jobs >= quota.jobs:
            return f"{_WAITING}{owner} may run {format_count(quota.jobs, 'job')} at once"
        if quota.gpus is not None and usage.gpus + gpus > quota.gpus:
            return f"{_WAITING}{owner} may hold {format_count(quota.gpus, 'GPU')} at once"
        return ""


def _explain_excess(owner: str, quota: Quota, gpus: int) -> str:
    """Return the reason why a job with `gpus` GPUs can never start with this quota, or ""."""
    if quota.gpus is None or gpus <= quota.gpus:
        return ""
    requested_text = format_count(gpus, "GPU")
    return f"the job requests {requested_text}, but {owner} may hold {quota.gpus} at once"


def require_counted_gpus(quotas: Mapping[str, Quota], are_gpus_counted: bool) -> None:
    """Raise InvalidInput if an owner has a quota of GPUs, but the server does not count GPUs."""
    for owner, quota in quotas.items():
        if quota.gpus is not None and not are_gpus_counted:
            raise InvalidInput(
                f"owner {owner} has a quota of GPUs, but the server has no --gpus",
                field="--gpus",
                hint="start the server with --gpus, or remove gpus=N from the token file",
            )
