"""Starts, shares, restarts and stops the teachers that a server runs.

Each teacher runs under a shim, as a trainer does, and outlives the server. The next server finds
the teachers by their directories (`home.py`) and follows them. Without a server, a teacher ends
some time after the end of the last trainer (`runners/local/lease.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clients.config.tables.teacher import STARTED_KEYS, TeacherLink
from clients.runs.directory import RunDirectory
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.verdict import Policy
from distill_server.jobs.waiting import format_clock
from distill_server.runners.interface import Exited, Outcome, Running
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Machine, Share
from distill_server.teachers import home as homes
from distill_server.teachers.home import Record
from protos.errors import ExitCode

log = logging.getLogger(__name__)

_LAST_SECONDS = 3.0
# The pause after an error of this server, such as a full disk.
_TROUBLE_SECONDS = 5.0


STATES = ("READY", "LOADING", "RESTING", "STOPPING", "FAILED")


@dataclass
class TeacherProcess:
    """One teacher: its record on the disk and its state in this server.

    - used_at: monotonic time of the last use by a running or waiting job.
    - since: Unix time of the last start or stop.
    - address: address of the teacher; "" until it listens.
    - stage: stage of the start, until the teacher listens.
    - deaths: number of ends of the process since the teacher last listened.
    - rests_until: monotonic time before which a dead teacher is not started again.
    - trouble: reason of the last end.
    - failure: reason why the server does not restart the teacher; "" if it does.
    - is_failure_reported: True if a job has FAILED with the reason `failure`.
    - is_inherited: True if an earlier server started the teacher and this server has not polled it.
    - task: the current call for this teacher.
    """

    key: str
    home: RunDirectory
    record: Record
    used_at: float
    since: float = field(default_factory=time.time)
    address: str = ""
    stage: str = ""
    deaths: int = 0
    rests_until: float = 0.0
    trouble: str = ""
    failure: str = ""
    is_failure_reported: bool = False
    is_running: bool = False
    is_inherited: bool = False
    is_stopping: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """The state that users see: READY, LOADING, STOPPING, FAILED, or RESTING after it died."""
        if self.failure:
            return "FAILED"
        if self.is_stopping:
            return "STOPPING"
        if self.address:
            return "READY"
        return "LOADING" if self.is_running or not self.trouble else "RESTING"

    @property
    def share(self) -> Share:
        """The teacher's share of the machine: GPUs, but no slot and no threads."""
        return Share(0, self.record.gpus, slots=0)

    def phase(self) -> str:
        """Return the phase of a job that waits for the teacher."""
        since = format_clock(self.since)
        match self.state:
            case "STOPPING":
                return (
                    f"WAITING teacher.model: the teacher has been stopping since {since};"
                    " the server will start it again"
                )
            case "RESTING":
                return f"WAITING teacher.model: {self.trouble}; the server starts the teacher again"
        last_trouble = f" ({self.trouble})" if self.trouble else ""
        stage = f", {self.stage}" if self.stage else ""
        return (
            "WAITING teacher.model: the teacher has been loading since"
            f" {since}{last_trouble}{stage}"
        )


class StartedTeachers:
    """The teachers of one server. Call all methods on the event loop."""

    def __init__(
        self, runs: Path, policy: Policy, files: RunFiles, wake: Callable[[], None]
    ) -> None:
        self._runs = runs
        self._policy = policy
        self._machine: Machine = policy.machine
        self._files = files
        self._wake = wake
        self._runner = LocalRunner(
            command=homes.command, has_trackers=False, lease=(runs, policy.lease)
        )
        self._users: Mapping[str, Sequence[str]] = {}
        now = time.monotonic()
        # Teachers of an earlier server. A teacher that does not run is removed when it is polled.
        self._teachers: dict[str, TeacherProcess] = {
            home.path.name: TeacherProcess(
                home.path.name, home, record, now, is_running=True, is_inherited=True
            )
            for home in homes.homes_in(runs)
            if (record := homes.read_record(home)) is not None
        }

    def __len__(self) -> int:
        return len(self._teachers)

    def __iter__(self) -> Iterator[TeacherProcess]:
        return iter(list(self._teachers.values()))

    def held_shares(self) -> list[Share]:
        """Return the GPUs that the teachers hold."""
        return [teacher.share for teacher in self._teachers.values() if not teacher.failure]

    async def poll_all(self, job_ids_by_key: Mapping[str, Sequence[str]]) -> None:
        """Poll all teachers, restart those that died, and stop those that no job needs any more.

        `job_ids_by_key` has the ids of active jobs by the key of their teacher.
        """
        self._users, now = job_ids_by_key, time.monotonic()
        for key, teacher in list(self._teachers.items()):
            if key in job_ids_by_key:
                teacher.used_at = now
            if teacher.is_failure_reported:  # the next start of the server removes its logs
                del self._teachers[key]
            elif teacher.task is not None:
                continue
            elif not teacher.is_running and (teacher.is_stopping or self._is_idle(teacher)):
                self._run_task(teacher, self._remove_teacher(teacher))
            else:
                self._run_task(teacher, self._follow_teacher(teacher))
        tasks = [teacher.task for teacher in self._teachers.values() if teacher.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._policy.poll_every)

    async def close(self) -> None:
        """Wait a short time for calls that have begun. The teachers keep running."""
        tasks = [teacher.task for teacher in self._teachers.values() if teacher.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()

    def touch(self, key: str) -> TeacherProcess | None:
        """Return the teacher with this key, or None if it is not started.

        Sets the time of the teacher's last use to now.
        """
        teacher = self._teachers.get(key)
        if teacher is not None:
            teacher.used_at = time.monotonic()
        return teacher

    def start(self, key: str, config: TeacherLink, shares: Sequence[Share]) -> TeacherProcess:
        """Start a teacher; `shares` are the shares in use.

        Raises LookupError, which names the missing resource, if the machine has too little free.
        """
        running_count = sum(not teacher.failure for teacher in self._teachers.values())
        if running_count >= self._machine.slots:
            raise LookupError(f"another teacher must end first; {running_count} teachers run")
        gpus = self._machine.gpus_for(config, shares)
        options = config.model_dump(include=set(STARTED_KEYS))
        teacher = TeacherProcess(
            key,
            homes.home_of(self._runs, key),
            Record(options, attempt=0, port=0, gpus=gpus),
            used_at=time.monotonic(),
        )
        self._teachers[key] = teacher
        self._run_task(teacher, self._start_attempt(teacher))
        return teacher

    def list_idle(self, needed: Iterable[str]) -> list[TeacherProcess]:
        """Return the running teachers that no active job uses and whose keys are not `needed`."""
        used_keys = {*self._users, *needed}
        return [
            teacher
            for key, teacher in self._teachers.items()
            if key not in used_keys and not teacher.is_stopping
        ]

    def stop(self, teacher: TeacherProcess) -> None:
        """Send SIGTERM to a teacher; it is removed when it has ended."""
        teacher.is_stopping, teacher.address, teacher.since = True, "", time.time()
        log.info("teacher %s: stopped, no job needs it", teacher.key)
        end = partial(self._runner.stop, teacher.home, teacher.record.attempt, now=False)
        self._files.start(end)

    def _run_task(self, teacher: TeacherProcess, coroutine: Coroutine[Any, Any, None]) -> None:
        def observable_state() -> tuple[object, ...]:
            is_listed = teacher.key in self._teachers
            return teacher.state, teacher.address, teacher.stage, teacher.is_running, is_listed

        async def run_guarded() -> None:
            previous_state = observable_state()
            try:
                await coroutine
            except Exception as error:  # a full disk, for example
                log.exception("teacher %s: retrying in %g s", teacher.key, _TROUBLE_SECONDS)
                if not teacher.is_running:
                    cause = (isinstance(error, OSError) and error.strerror) or error
                    self._schedule_restart(teacher, f"the teacher could not be started: {cause}")
                teacher.rests_until = time.monotonic() + _TROUBLE_SECONDS
            finally:
                teacher.task = None
                # Do not wake the scheduler without a change: it would poll again at once, forever.
                if observable_state() != previous_state:
                    self._wake()

        teacher.task = asyncio.create_task(run_guarded())

    async def _remove_teacher(self, teacher: TeacherProcess) -> None:
        """Remove a teacher that has ended, and delete its directory."""
        await self._files.start(partial(homes.remove, teacher.home))
        self._teachers.pop(teacher.key, None)

    async def _follow_teacher(self, teacher: TeacherProcess) -> None:
        if time.monotonic() < teacher.rests_until or teacher.failure:
            return
        if not teacher.is_running:
            await self._start_attempt(teacher)
            return
        outcome, address, port, log_message = await self._files.start(
            partial(self._poll_teacher, teacher)
        )
        if isinstance(outcome, Running):
            teacher.is_inherited, teacher.stage = False, log_message
            if address and not teacher.address and not teacher.is_stopping:
                await self._record_address(teacher, address, port)
            if self._is_idle(teacher) and not teacher.is_stopping:
                self.stop(teacher)
        elif teacher.is_stopping or (teacher.is_inherited and teacher.key not in self._users):
            teacher.is_running, teacher.is_stopping = False, True
            await self._remove_teacher(teacher)
        else:
            self._judge_end(
                teacher, outcome, log_message, has_listened=bool(teacher.address or address)
            )

    def _poll_teacher(self, teacher: TeacherProcess) -> tuple[Outcome, str, int, str]:
        """Poll a teacher and read its log; blocking.

        Returns the outcome, the address and port if the log has a new address, and the stage of a
        start or the error of an end.
        """
        homes.renew_lease(teacher.home)
        log_file = teacher.home.log_file(teacher.record.attempt)
        outcome = self._runner.poll(teacher.home, teacher.record.attempt)
        address, port = ("", 0) if teacher.address else homes.read_address(log_file)
        if not isinstance(outcome, Running):
            log_message = homes.read_error(log_file)
        else:
            log_message = "" if teacher.address or address else homes.read_stage(log_file)
        return outcome, address, port, log_message

    async def _record_address(self, teacher: TeacherProcess, address: str, port: int) -> None:
        # The next attempt listens on the same port, so that trainers find it.
        teacher.record = replace(teacher.record, port=port)
        teacher.address, teacher.deaths, teacher.trouble = address, 0, ""
        log.info("teacher %s: listening on %s", teacher.key, address)
        # The next server reads the port from the record.
        await self._files.start(partial(homes.write_record, teacher.home, teacher.record))

    def _judge_end(
        self, teacher: TeacherProcess, outcome: Outcome, complaint: str, *, has_listened: bool
    ) -> None:
        """Decide whether a teacher that ended by itself is started again or has failed."""
        code = outcome.code if isinstance(outcome, Exited) else None
        ending = "disappeared" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            ending = f"was killed by signal {-code}"
        cause = f"the teacher {ending}"
        has_moved = bool(teacher.record.port)
        self._schedule_restart(
            teacher, cause if has_listened or (code or 0) < 0 else f"{cause}: {complaint}"
        )
        if not has_listened and has_moved:
            # Another program may have taken the teacher's port.
            teacher.record = replace(teacher.record, port=0)
        elif not has_listened and (code == ExitCode.USAGE or teacher.deaths > self._policy.retries):
            teacher.failure = f"teacher.model: the teacher cannot be started: {complaint}"

    def _schedule_restart(self, teacher: TeacherProcess, cause: str) -> None:
        teacher.is_running, teacher.address, teacher.stage, teacher.trouble = False, "", "", cause
        pause = 0.0
        if teacher.deaths:
            backoff = self._policy.backoff * 2 ** min(30, teacher.deaths - 1)
            pause = min(self._policy.longest_backoff, backoff)
        teacher.deaths += 1
        teacher.rests_until = time.monotonic() + pause
        log.warning("teacher %s: %s; next start in %g s", teacher.key, cause, pause)

    async def _start_attempt(self, teacher: TeacherProcess) -> None:
        """Start the next attempt of a teacher."""
        await self._files.start(partial(self._start_process, teacher))
        teacher.is_running, teacher.since, teacher.is_inherited = True, time.time(), False
        if teacher.is_stopping:  # the teacher was stopped during the start
            self.stop(teacher)

    def _start_process(self, teacher: TeacherProcess) -> None:
        """Write the record of the next attempt and start it; blocking."""
        last_record = homes.read_record(teacher.home)
        attempt = max(teacher.record.attempt, last_record.attempt if last_record else 0) + 1
        teacher.record = replace(teacher.record, attempt=attempt)
        homes.write_record(teacher.home, teacher.record)
        share = Share(self._machine.cpus_per_job, teacher.record.gpus)
        self._runner.start(teacher.home, attempt=attempt, processes=1, from_step=None, share=share)

    def _is_idle(self, teacher: TeacherProcess) -> bool:
        return time.monotonic() - teacher.used_at > self._policy.linger
