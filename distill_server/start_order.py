"""Selects the queued jobs that start now, and the share of the machine of each."""

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
from distill_server.teachers.needs import (
    NoRoomForTeacher,
    TeacherAwaited,
    TeacherNeeds,
    TeacherReady,
)
from protos.errors import InvalidInput


@dataclass(frozen=True)
class DueJob:
    """A job that starts now.

    - share: the CPU threads and GPUs of the job.
    - teacher, address: key and address of the teacher that the server runs for the job; "" if the
      server runs none.
    """

    job: Job
    share: Share
    teacher: str = ""
    address: str = ""


class StartOrder:
    """Selects the jobs of the queue that start. Call all methods on the event loop."""

    def __init__(
        self,
        store: JobStore,
        machine: Machine,
        waits: Waits,
        needs: TeacherNeeds,
        is_resting: Callable[[Job], bool],
        boundary: Callable[[Job], AbstractContextManager[None]],
        quotas: Quotas,
    ) -> None:
        """`is_resting(job)` is True if the job waits after a failure, or if a task works on it.

        `boundary(job)` is a context manager that logs an error of its block, so that an error of
        one job does not stop other jobs.
        """
        self._store = store
        self._machine = machine
        self._waits = waits
        self._needs = needs
        self._is_resting = is_resting
        self._boundary = boundary
        self._quotas = quotas
        # Queued jobs that request more than this server has.
        self._too_large: set[str] = set()
        # The number of jobs that the last pass skipped.
        self._passed_count = 0

    def held_shares(self) -> list[Share]:
        """Return the shares that the active jobs and the teachers of this server hold."""
        return [*self._store.held_shares(), *self._needs.teachers.held_shares()]

    def due_jobs(self) -> Iterator[DueJob]:
        """Yield the jobs that start now, in the order of the queue.

        A job that waits for its share blocks the jobs behind it, because otherwise small jobs could
        delay a large job forever. The share of a job whose teacher loads is reserved.

        These jobs do not block others:

        - a job that waits for a retry or for a service
        - a job that waits for the quota of its owner; it blocks only jobs of the same owner
        - a job that requests more than the machine has, after a restart of the server on a smaller
          machine
        """
        self._needs.begin_pass()
        self._quotas.begin_pass()
        shares = self.held_shares()
        free_slots = max(0, self._machine.slots - sum(share.slots for share in shares))
        # Read only as many jobs as can start: the queue may hold ten thousand.
        limit = free_slots and free_slots + max(
            self._passed_count, len(self._too_large) + len(self._waits)
        )
        self._passed_count = 0
        for job in self._store.startable_jobs(limit, self._quotas.other_owners()):
            decision: DueJob | TeacherAwaited | None = TeacherAwaited()
            if not self._is_passed_over(job):
                with self._boundary(job):
                    decision = self._decide_start(job, shares)
            match decision:
                case None:
                    return
                case TeacherAwaited(reserved=None):
                    self._passed_count += 1
                case TeacherAwaited(reserved=Share() as share):
                    shares.append(share)
                    self._quotas.count_start(job, len(share.gpus or ()))
                case DueJob():
                    shares.append(decision.share)
                    self._quotas.count_start(job, len(decision.share.gpus or ()))
                    yield decision

    def _is_passed_over(self, job: Job) -> bool:
        return self._is_resting(job) or job.id in self._too_large or self._waits.is_waiting(job)

    def _decide_start(self, job: Job, shares: Sequence[Share]) -> DueJob | TeacherAwaited | None:
        """Decide how to continue with one queued job.

        The result is a DueJob if the job starts, and TeacherAwaited if the queue continues with the
        next job. It is None if the job must wait and blocks the jobs behind it.
        """
        try:
            config = parse_config(job.config_json)
        except InvalidInput:  # written by an older version; the start reports the error
            has_slot = sum(share.slots for share in shares) < self._machine.slots
            return DueJob(job, Share(0, ())) if has_slot else None
        try:
            self._machine.require_room(config)
        except InvalidInput as error:
            # The job waits until a server with more resources runs it.
            self._too_large.add(job.id)
            self._write_phase(job, str(error))
            return TeacherAwaited()
        if phase := self._quotas.explain_wait(job, self._machine.gpus_of_job(config)):
            self._write_phase(job, phase)
            return TeacherAwaited()
        share = self._machine.allocate_share(config, shares)
        if share is None:
            self._write_phase(job, "")
            self._make_room(config, shares)
            return None
        try:
            teacher_state = self._needs.check(job, config, share, shares)
        except InvalidInput as error:
            change = Change(JobState.FAILED, reason=error.message, phase="")
            self._store.change(job.id, change)
            return TeacherAwaited()
        match teacher_state:
            case TeacherReady():
                return DueJob(job, share, teacher_state.key, teacher_state.address)
            case TeacherAwaited():
                self._write_phase(job, teacher_state.phase or job.phase)
                return teacher_state
            case NoRoomForTeacher():
                self._write_phase(job, teacher_state.phase)
                self._needs.make_room()
                return None

    def _make_room(self, config: AnyJob, shares: Sequence[Share]) -> None:
        """Stop the idle teachers if the job could start with their GPUs."""
        idle_gpus = {gpu for share in self._needs.idle_shares() for gpu in share.gpus or ()}
        shares_without_idle = [
            replace(share, gpus=tuple(gpu for gpu in share.gpus if gpu not in idle_gpus))
            for share in shares
            if share.gpus is not None
        ]
        if idle_gpus and not self._machine.explain_lack(config, shares_without_idle):
            self._needs.make_room()

    def _write_phase(self, job: Job, phase: str) -> None:
        must_write = job.phase.startswith("WAITING ") or phase
        if must_write and job.phase != phase:
            self._store.change(job.id, Change(phase=phase))
