"""Decides which queued jobs start now, with which share of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from clients.config.kinds import AnyJob
from clients.jobs.job import Job, JobState
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.store import Change, JobStore
from distill_server.jobs.waiting import Waits
from distill_server.people.quotas import Quotas
from distill_server.runners.machine import Machine, Share
from distill_server.teachers.needs import Awaited, Crowded, Ready, TeacherNeeds
from protos.errors import InvalidInput


@dataclass(frozen=True)
class Due:
    """A job that starts now. teacher, address: of a teacher that the server runs for it, or ""."""

    job: Job
    share: Share
    teacher: str = ""
    address: str = ""


class StartOrder:
    """Goes through the queue. Call all methods on the event loop."""

    def __init__(
        self,
        store: JobStore,
        machine: Machine,
        waits: Waits,
        needs: TeacherNeeds,
        is_left_alone: Callable[[Job], bool],
        boundary: Callable[[Job], AbstractContextManager[None]],
        quotas: Quotas,
    ) -> None:
        """`is_left_alone`: the job rests after a failure, or a task works on it.

        `boundary` keeps an error of one job from the others.
        """
        self._store = store
        self._machine = machine
        self._waits = waits
        self._needs = needs
        self._is_left_alone = is_left_alone
        self._boundary = boundary
        self._quotas = quotas
        # Queued jobs that request more than this server has.
        self._too_large: set[str] = set()
        # The number of jobs that the last pass went by.
        self._passed = 0

    def held_shares(self) -> list[Share]:
        """Return what the active jobs and the teachers of this server hold."""
        return [*self._store.held_shares(), *self._needs.teachers.held_shares()]

    def due(self) -> Iterator[Due]:
        """Yield the jobs that start now, in the order of the queue.

        A job that waits for its share blocks the jobs behind it, because otherwise small jobs could
        delay a large one for ever; one whose teacher loads has its share reserved. Jobs that wait
        for a retry, for what is away or for the quota of their owner, or that request more than a
        restarted server has, block no job of another owner.
        """
        self._needs.begin_pass()
        self._quotas.begin_pass()
        held = self.held_shares()
        free = max(0, self._machine.slots - sum(share.slots for share in held))
        # Read only as many jobs as can start: the queue may hold ten thousand.
        limit = free and free + max(self._passed, len(self._too_large) + len(self._waits))
        self._passed = 0
        for job in self._store.startable_jobs(limit, self._quotas.others()):
            decision: Due | Awaited | None = Awaited()
            if not self._is_passed_over(job):
                with self._boundary(job):
                    decision = self._decide(job, held)
            match decision:
                case None:
                    return
                case Awaited(reserved=None):
                    self._passed += 1
                case Awaited(reserved=Share() as share):
                    held.append(share)
                    self._quotas.take(job, len(share.gpus or ()))
                case Due():
                    held.append(decision.share)
                    self._quotas.take(job, len(decision.share.gpus or ()))
                    yield decision

    def _is_passed_over(self, job: Job) -> bool:
        return self._is_left_alone(job) or job.id in self._too_large or self._waits.is_waiting(job)

    def _decide(self, job: Job, held: Sequence[Share]) -> Due | Awaited | None:
        """Return how a job starts, or that the queue goes on without it; None if it blocks it."""
        try:
            config = parse_config(job.config_json)
        except InvalidInput:  # written by an older version; the start reports the error
            return Due(job, Share(0, ())) if self._has_slot(held) else None
        try:
            self._machine.require_room(config)
        except InvalidInput as error:
            # It waits until a server with more resources runs it.
            self._too_large.add(job.id)
            self._tell(job, str(error))
            return Awaited()
        if phase := self._quotas.lack(job, self._machine.gpus_of_job(config)):
            self._tell(job, phase)
            return Awaited()
        share = self._machine.share(config, held)
        if share is None:
            self._tell(job, "")
            self._make_room(config, held)
            return None
        try:
            need = self._needs.of(job, config, share, held)
        except InvalidInput as error:
            change = Change(JobState.FAILED, reason=error.message, phase="")
            self._store.change(job.id, change)
            return Awaited()
        match need:
            case Ready():
                return Due(job, share, need.key, need.address)
            case Awaited():
                self._tell(job, need.phase or job.phase)
                return need
            case Crowded():
                self._tell(job, need.phase)
                self._needs.make_room()
                return None

    def _has_slot(self, held: Sequence[Share]) -> bool:
        return sum(share.slots for share in held) < self._machine.slots

    def _make_room(self, config: AnyJob, held: Sequence[Share]) -> None:
        """Stop idle teachers if the job could start in their place."""
        idle = {gpu for share in self._needs.idle_shares() for gpu in share.gpus or ()}
        without = [
            replace(share, gpus=tuple(gpu for gpu in share.gpus if gpu not in idle))
            for share in held
            if share.gpus is not None
        ]
        if idle and not self._machine.lack(config, without):
            self._needs.make_room()

    def _tell(self, job: Job, phase: str) -> None:
        told = job.phase.startswith("WAITING ") or phase
        if told and job.phase != phase:
            self._store.change(job.id, Change(phase=phase))
