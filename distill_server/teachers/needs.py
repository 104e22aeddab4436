"""Finds and starts the teacher that a queued job needs, and checks whether it listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clients.config.kinds import AnyJob
from clients.config.tables.after import outputs_in
from clients.config.tables.teacher import TeacherLink
from clients.jobs.job import Job
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.pipelines.linking import with_paths
from distill_server.runners.machine import Share
from distill_server.teachers.home import key_of
from distill_server.teachers.started import StartedTeachers, TeacherProcess
from protos.errors import DistillError, InvalidInput

log = logging.getLogger(__name__)

# The pause after a model's files could not be read.
_TROUBLE_SECONDS = 5.0


@dataclass(frozen=True)
class TeacherReady:
    """The job can start.

    `key` and `address` identify its teacher; "" if the server does not run the job's teacher.
    """

    key: str = ""
    address: str = ""


@dataclass(frozen=True)
class TeacherAwaited:
    """The job waits for its teacher and does not block the queue.

    `phase` is the job's new phase; "" keeps the old phase. `reserved` is the job's share of the
    machine, reserved while the teacher loads.
    """

    phase: str = ""
    reserved: Share | None = None


@dataclass(frozen=True)
class NoRoomForTeacher:
    """The job waits because its teacher finds too few free resources, and blocks the queue.

    `phase` is the job's new phase.
    """

    phase: str


@dataclass(frozen=True)
class _IdentifiedTeacher:
    """The teacher that one attempt needs.

    - key, config: key and options of the teacher; `config` is None if they cannot be found.
    - problem: the reason, if `config` is None.
    """

    key: str = ""
    config: TeacherLink | None = None
    problem: str = ""


class TeacherNeeds:
    """Finds the teachers of queued jobs, and starts them. Call all methods on the event loop."""

    def __init__(
        self,
        store: JobStore,
        runs: Path,
        teachers: StartedTeachers,
        files: RunFiles,
        wake: Callable[[], None],
    ) -> None:
        self.teachers = teachers
        self._store = store
        self._runs = runs
        self._files = files
        self._wake = wake
        # The key is the job and the attempt: a model's files may change between two attempts.
        self._identified: dict[tuple[str, int], _IdentifiedTeacher] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._requested_attempts: set[tuple[str, int]] = set()

    def begin_pass(self) -> None:
        """Begin a pass through the queue.

        The teachers of attempts that the last pass did not check are forgotten.
        """
        self._identified = {
            job: identified
            for job, identified in self._identified.items()
            if job in self._requested_attempts
        }
        self._requested_attempts = set()

    def check(
        self, job: Job, config: AnyJob, share: Share, shares: Sequence[Share]
    ) -> TeacherReady | TeacherAwaited | NoRoomForTeacher:
        """Check the teacher that a queued job needs; start a teacher that does not run.

        `share` is the job's future share of the machine, `shares` are the shares in use. Raises
        InvalidInput if the teacher cannot be started.
        """
        if config.started_teacher is None:
            return TeacherReady()
        attempt = (job.id, job.attempt)
        self._requested_attempts.add(attempt)
        if attempt not in self._identified:
            if attempt not in self._tasks:
                identify = self._identify(job, config)
                self._tasks[attempt] = asyncio.create_task(identify)
            return TeacherAwaited(reserved=share)
        identified = self._identified[attempt]
        if identified.config is None:
            raise InvalidInput(identified.problem)
        teacher = self.teachers.touch(identified.key)
        if teacher is None:
            try:
                teacher = self.teachers.start(identified.key, identified.config, [*shares, share])
            except LookupError as lack:
                return NoRoomForTeacher(f"WAITING teacher.model: {lack}")
        if teacher.failure:
            teacher.is_failure_reported = True
            raise InvalidInput(teacher.failure)
        if teacher.address:
            return TeacherReady(identified.key, teacher.address)
        return TeacherAwaited(teacher.phase(), None if teacher.state == "RESTING" else share)

    def make_room(self) -> None:
        """Stop the idle teachers: no active job uses them, and no job of this pass needs them."""
        for teacher in self._list_idle():
            self.teachers.stop(teacher)

    def idle_shares(self) -> list[Share]:
        """Return the shares (GPUs) of the idle teachers, which `make_room` would stop."""
        return [teacher.share for teacher in self._list_idle()]

    def _list_idle(self) -> list[TeacherProcess]:
        return self.teachers.list_idle(
            identified.key
            for job, identified in self._identified.items()
            if job in self._requested_attempts
        )

    async def _identify(self, job: Job, config: AnyJob) -> None:
        attempt = (job.id, job.attempt)
        try:
            jobs_read = {output.job: self._store.job(output.job) for output in outputs_in(config)}
            identify = partial(_identify_teacher, config, self._runs, jobs_read)
            self._identified[attempt] = await self._files.start(identify)
        except OSError:  # also Unavailable: the disk does not answer
            log.exception("job %s: cannot read its model; retrying", job.id)
            await asyncio.sleep(_TROUBLE_SECONDS)
        except DistillError as error:
            self._identified[attempt] = _IdentifiedTeacher(problem=str(error))
        finally:
            del self._tasks[attempt]
            self._wake()


def _identify_teacher(config: AnyJob, runs: Path, jobs_read: dict[str, Job]) -> _IdentifiedTeacher:
    """Return the key and options of a job's teacher, from the files of its model. Blocking."""
    teacher = with_paths(config, runs, jobs_read).started_teacher
    assert teacher is not None
    return _IdentifiedTeacher(key_of(teacher), teacher)
