"""The slots in use, and for each queued job its place in the queue and its reason to wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from clients.jobs.job import Job, JobState
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.store import JobStore
from distill_server.runners.machine import UNCOUNTED, Machine, Share
from distill_server.scheduler import Scheduler
from protos.errors import InvalidInput

# The number of queued jobs that are read to find the job that the server starts next.
_MAX_READ = 100


class Places:
    """The queue at the time when this object is created, with the place of each queued job.

    Create a new object for each answer, on the event loop.
    """

    def __init__(self, store: JobStore, scheduler: Scheduler, machine: Machine) -> None:
        self._store = store
        self._scheduler = scheduler
        self._machine = machine
        self._queue = store.queue()
        self._place = {job_id: place for place, job_id in enumerate(self._queue, 1)}
        self._held_shares: Sequence[Share] = scheduler.order.held_shares()

    def capacity(self) -> dict[str, Any]:
        """Return `slots`, `cpus` and `gpus`, each as [used, total], and the number of `queued`.

        `cpus` or `gpus` is None if the server does not divide them among its jobs.
        """
        machine, shares = self._machine, self._held_shares
        cpus = [sum(share.cpus for share in shares), machine.all_cpus]
        gpus = [sum(len(share.gpus or ()) for share in shares), len(machine.gpus or ())]
        return {
            "slots": [sum(share.slots for share in shares), machine.slots],
            "cpus": cpus if machine.all_cpus < UNCOUNTED else None,
            "gpus": gpus if machine.gpus is not None else None,
            "queued": len(self._queue),
        }

    def describe(self, job: Job) -> Mapping[str, Any]:
        """Return a mapping that describes the wait of a QUEUED job; empty in any other state.

        - place: the place in the queue, from 1.
        - why: the reason why the job waits.
        - retry_at: Unix time of the next try after a failure; 0 without a failure.
        """
        if job.state is not JobState.QUEUED:
            return {}
        seconds = self._scheduler.rest_seconds(job)
        return {
            "place": self._place.get(job.id, 0),
            "why": self._explain_wait(job),
            "retry_at": round(time.time() + seconds) if seconds else 0,
        }

    def phase_of(self, job: Job) -> str:
        """Return the phase of a QUEUED job: its place in the queue, and the reason why it waits."""
        return f"WAITING place {self._place.get(job.id, 0)}: {self._explain_wait(job)}"

    def _explain_wait(self, job: Job) -> str:
        if self._scheduler.rest_seconds(job):
            return "the job waits after a failure"
        if job.phase.startswith("WAITING "):
            return job.phase
        try:
            config = parse_config(job.config_json)
            self._machine.require_room(config)
        except InvalidInput as error:
            return str(error)
        if lack := self._machine.explain_lack(config, self._held_shares):
            return lack
        next_job_id = self._next_job_id
        if next_job_id == job.id:
            return "the job starts next"
        if not next_job_id:
            return f"{self._place.get(job.id, 1) - 1} jobs are before it"
        return f"{next_job_id} is before it"

    @cached_property
    def _next_job_id(self) -> str:
        """Return the first job of the queue that later jobs cannot overtake.

        Returns "" if the first 100 jobs can all be overtaken.
        """
        for job_id in self._queue[:_MAX_READ]:
            if not self._is_passed_over(self._store.job(job_id)):
                return job_id
        return ""

    def _is_passed_over(self, job: Job) -> bool:
        if self._scheduler.rest_seconds(job) or self._scheduler.waits.is_waiting(job):
            return True
        if self._store.dependencies.has_unmet(job.id):
            return True
        try:
            self._machine.require_room(parse_config(job.config_json))
        except InvalidInput:
            return True
        return False
