"""Which of the teachers that the server runs a queued job needs, and whether it listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clients.config.kinds import AnyJob, started_teacher
from clients.config.tables.after import outputs_in
from clients.config.tables.teacher import TeacherLink
from clients.jobs.job import Job
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.pipelines.linking import with_paths
from distill_server.runners.machine import Share
from distill_server.teachers.home import key_of
from distill_server.teachers.started import StartedTeachers, Teacher
from protos.errors import DistillError, InvalidInput

log = logging.getLogger(__name__)

# The pause before a model is looked at again that could not be read.
_TROUBLE_SECONDS = 5.0


@dataclass(frozen=True)
class Ready:
    """The job can start. key, address: of its teacher; "" if the server runs none for it."""

    key: str = ""
    address: str = ""


@dataclass(frozen=True)
class Awaited:
    """The job waits for its teacher, and the queue goes on. `phase` tells so, if it is not "".

    `reserved` is its share of the machine, kept for it while the teacher loads.
    """

    phase: str = ""
    reserved: Share | None = None


@dataclass(frozen=True)
class Crowded:
    """The machine has no room for the job's teacher beside the job. `phase` tells so."""

    phase: str


@dataclass(frozen=True)
class _Identified:
    """The teacher of one attempt. problem: why it has none, in place of the other two."""

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
        # By job and attempt: the files of a model may have changed since the last one.
        self._found: dict[tuple[str, int], _Identified] = {}
        self._looks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._asked: set[tuple[str, int]] = set()

    def begin_pass(self) -> None:
        """Begin to go through the queue; forget jobs that the last pass did not ask for."""
        self._found = {job: one for job, one in self._found.items() if job in self._asked}
        self._asked = set()

    def of(
        self, job: Job, config: AnyJob, share: Share, held: Sequence[Share]
    ) -> Ready | Awaited | Crowded:
        """Return whether the teacher of a queued job listens; start it if it does not run.

        `share` is what the job will take of the machine, `held` what others hold. Raises
        InvalidInput if its teacher cannot be started.
        """
        if started_teacher(config) is None:
            return Ready()
        attempt = (job.id, job.attempt)
        self._asked.add(attempt)
        if attempt not in self._found:
            if attempt not in self._looks:
                look = self._identify(job, config)
                self._looks[attempt] = asyncio.create_task(look)
            return Awaited(reserved=share)
        found = self._found[attempt]
        if found.config is None:
            raise InvalidInput(found.problem)
        teacher = self.teachers.wanted(found.key)
        if teacher is None:
            try:
                teacher = self.teachers.start(found.key, found.config, [*held, share])
            except LookupError as lack:
                return Crowded(f"WAITING teacher.model: {lack}")
        if teacher.failure:
            teacher.told = True
            raise InvalidInput(teacher.failure)
        if teacher.address:
            return Ready(found.key, teacher.address)
        return Awaited(teacher.phase(), None if teacher.state == "RESTING" else share)

    def make_room(self) -> None:
        """Stop the teachers that neither active jobs need nor those of this pass."""
        for teacher in self._idle():
            self.teachers.stop(teacher)

    def idle_shares(self) -> list[Share]:
        """Return what `make_room` would free."""
        return [teacher.share for teacher in self._idle()]

    def _idle(self) -> list[Teacher]:
        return self.teachers.idle(one.key for job, one in self._found.items() if job in self._asked)

    async def _identify(self, job: Job, config: AnyJob) -> None:
        attempt = (job.id, job.attempt)
        try:
            before = {output.job: self._store.job(output.job) for output in outputs_in(config)}
            look = partial(_identified, config, self._runs, before)
            self._found[attempt] = await self._files.start(look)
        except OSError:  # also Unavailable: the disk does not answer
            log.exception("job %s: cannot read its model; retrying", job.id)
            await asyncio.sleep(_TROUBLE_SECONDS)
        except DistillError as error:
            self._found[attempt] = _Identified(problem=str(error))
        finally:
            del self._looks[attempt]
            self._wake()


def _identified(config: AnyJob, runs: Path, before: dict[str, Job]) -> _Identified:
    """Find the model of a job's teacher on the disk; blocking."""
    teacher = started_teacher(with_paths(config, runs, before))
    assert teacher is not None
    return _Identified(key_of(teacher), teacher)
