"""Starts, shares, restarts and stops the teachers that a server runs.

The processes outlive the server, each under a shim as trainers are; the next server finds them by
their directories (`home.py`) and goes on.
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

from clients.config.tables.teacher import TeacherLink
from clients.runs.directory import RunDirectory
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.waiting import format_clock
from distill_server.policy import Policy
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
class Teacher:
    """One teacher: its record on the disk, and what this server knows about it.

    `address` is "" until it listens; `stage` is how far its start is then. `deaths` counts its ends
    since it last listened; `rests_until` is the monotonic time of the next start. `used_at` is the
    monotonic time at which a job last used it or waited for it. `trouble` is why it ended last,
    `failure` why it is given up, and `told` that its jobs know.
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
    told: bool = False
    runs: bool = False
    found: bool = False
    stops: bool = False
    work: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """A word for people: READY, LOADING, RESTING (it died), STOPPING or FAILED."""
        if self.failure:
            return "FAILED"
        if self.stops:
            return "STOPPING"
        if self.address:
            return "READY"
        return "LOADING" if self.runs or not self.trouble else "RESTING"

    @property
    def share(self) -> Share:
        """What it takes of the machine beside the jobs: GPUs, but no slot and no threads."""
        return Share(0, self.record.gpus, slots=0)

    def phase(self) -> str:
        """The phase of a job that waits for it."""
        since = format_clock(self.since)
        match self.state:
            case "STOPPING":
                return f"WAITING teacher.model: it stops since {since}, and starts again"
            case "RESTING":
                return f"WAITING teacher.model: {self.trouble}; it starts again"
        again = f" ({self.trouble})" if self.trouble else ""
        stage = f", {self.stage}" if self.stage else ""
        return f"WAITING teacher.model: it loads since {since}{again}{stage}"


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
        self._runner = LocalRunner(command=homes.command)
        self._used: Mapping[str, Sequence[str]] = {}
        now = time.monotonic()
        # Teachers of an earlier server; those that do not run are forgotten when they are polled.
        self._teachers: dict[str, Teacher] = {
            home.path.name: Teacher(home.path.name, home, record, now, runs=True, found=True)
            for home in homes.homes_in(runs)
            if (record := homes.read_record(home)) is not None
        }

    def __len__(self) -> int:
        return len(self._teachers)

    def __iter__(self) -> Iterator[Teacher]:
        return iter(list(self._teachers.values()))

    def held_shares(self) -> list[Share]:
        """Return the GPUs that the teachers hold."""
        return [teacher.share for teacher in self._teachers.values() if not teacher.failure]

    async def look(self, used: Mapping[str, Sequence[str]]) -> None:
        """Poll all teachers, restart those that died, and stop those that nobody needs any more.

        `used`: the ids of active jobs by the key of their teacher.
        """
        self._used, now = used, time.monotonic()
        for key, teacher in list(self._teachers.items()):
            if key in used:
                teacher.used_at = now
            if teacher.told:  # its logs stay until the next start of the server
                del self._teachers[key]
            elif teacher.work is not None:
                continue
            elif not teacher.runs and (teacher.stops or self._is_idle(teacher)):
                self._do(teacher, self._forget(teacher))
            else:
                self._do(teacher, self._follow(teacher))
        works = [teacher.work for teacher in self._teachers.values() if teacher.work is not None]
        if works:
            await asyncio.wait(works, timeout=self._policy.look_every)

    async def close(self) -> None:
        """Wait for calls that have begun, for a short time. The teachers keep running."""
        works = [teacher.work for teacher in self._teachers.values() if teacher.work is not None]
        if works:
            await asyncio.wait(works, timeout=_LAST_SECONDS)
        for work in works:
            work.cancel()

    def wanted(self, key: str) -> Teacher | None:
        """Return the teacher with this key for a job that needs it; None if it is not started."""
        teacher = self._teachers.get(key)
        if teacher is not None:
            teacher.used_at = time.monotonic()
        return teacher

    def start(
        self, key: str, config: TeacherLink, held: Sequence[Share], *, kept: bool = False
    ) -> Teacher:
        """Start a teacher beside the shares that are held. `kept`: see Record.

        Raises LookupError, with what it must wait for, if the machine has no room.
        """
        running = sum(not teacher.failure for teacher in self._teachers.values())
        if running >= self._machine.slots:
            by_hand = sum(one.record.kept for one in self._teachers.values())
            stop = f", {by_hand} until distill teacher down" if by_hand else ""
            raise LookupError(f"the end of another teacher; {running} run{stop}")
        gpus = self._machine.gpus_for(config, held)
        options = homes.options_of(config).model_dump(include=set(homes.OPTIONS))
        teacher = Teacher(
            key,
            homes.home_of(self._runs, key),
            Record(options, attempt=0, port=0, gpus=gpus, kept=kept),
            used_at=time.monotonic(),
        )
        self._teachers[key] = teacher
        self._do(teacher, self._begin(teacher))
        return teacher

    def idle(self, needed: Iterable[str]) -> list[Teacher]:
        """Return the running teachers that no active job uses and that are not `needed`."""
        busy = {*self._used, *needed}
        free = (one for key, one in self._teachers.items() if key not in busy)
        return [one for one in free if not one.stops and not one.record.kept]

    async def keep(self, teacher: Teacher, *, kept: bool) -> None:
        """Keep a teacher without jobs until this is called again with False."""
        while teacher.work is not None:  # it may write the record, too
            await asyncio.wait({teacher.work})
        teacher.record = replace(teacher.record, kept=kept)
        teacher.used_at = time.monotonic()
        if teacher.record.attempt:  # else its start writes the record
            await self._files.start(partial(homes.write_record, teacher.home, teacher.record))

    def stop_if_unused(self, teacher: Teacher) -> None:
        """Stop a teacher that no active job uses, or forget it if it has failed."""
        if teacher.key in self._used or teacher.stops:
            return
        if teacher.runs:
            self.stop(teacher)
        else:
            teacher.stops = True
        self._wake()

    def stop(self, teacher: Teacher) -> None:
        """Ask a teacher to end; it is forgotten when it has."""
        teacher.stops, teacher.address, teacher.since = True, "", time.time()
        log.info("teacher %s: stopped, no job needs it", teacher.key)
        end = partial(self._runner.stop, teacher.home, teacher.record.attempt, now=False)
        self._files.start(end)

    def _do(self, teacher: Teacher, work: Coroutine[Any, Any, None]) -> None:
        def facts() -> tuple[object, ...]:
            known = teacher.key in self._teachers
            return teacher.state, teacher.address, teacher.stage, teacher.runs, known

        async def guarded() -> None:
            before = facts()
            try:
                await work
            except Exception as error:  # a full disk, for example
                log.exception("teacher %s: retrying in %g s", teacher.key, _TROUBLE_SECONDS)
                if not teacher.runs:
                    why = (isinstance(error, OSError) and error.strerror) or error
                    self._died(teacher, f"it could not be started: {why}")
                teacher.rests_until = time.monotonic() + _TROUBLE_SECONDS
            finally:
                teacher.work = None
                # Not after each poll: the scheduler polls, and would go on without a pause.
                if facts() != before:
                    self._wake()

        teacher.work = asyncio.create_task(guarded())

    async def _forget(self, teacher: Teacher) -> None:
        """Forget a teacher that does not run any more, with its directory."""
        await self._files.start(partial(homes.remove, teacher.home))
        self._teachers.pop(teacher.key, None)

    async def _follow(self, teacher: Teacher) -> None:
        if time.monotonic() < teacher.rests_until or teacher.failure:
            return
        if not teacher.runs:
            await self._begin(teacher)
            return
        outcome, address, port, said = await self._files.start(partial(self._see, teacher))
        if isinstance(outcome, Running):
            teacher.found, teacher.stage = False, said
            if address and not teacher.address and not teacher.stops:
                await self._listens(teacher, address, port)
            if self._is_idle(teacher) and not teacher.stops:
                self.stop(teacher)
        elif teacher.stops or (teacher.found and not self._is_needed(teacher)):
            teacher.runs, teacher.stops = False, True
            await self._forget(teacher)
        else:
            self._ended(teacher, outcome, said, listened=bool(teacher.address or address))

    def _see(self, teacher: Teacher) -> tuple[Outcome, str, int, str]:
        """Poll a teacher and read its log: its address, and how far it is or why it ended.

        Blocking.
        """
        file = teacher.home.log_file(teacher.record.attempt)
        outcome = self._runner.poll(teacher.home, teacher.record.attempt)
        address, port = ("", 0) if teacher.address else homes.address_in(file)
        if not isinstance(outcome, Running):
            said = homes.complaint_in(file)
        else:
            said = "" if teacher.address or address else homes.stage_in(file)
        return outcome, address, port, said

    async def _listens(self, teacher: Teacher, address: str, port: int) -> None:
        # The next attempt listens on the same port, so that trainers find it.
        teacher.record = replace(teacher.record, port=port)
        teacher.address, teacher.deaths, teacher.trouble = address, 0, ""
        log.info("teacher %s: listening on %s", teacher.key, address)
        # For the next server.
        await self._files.start(partial(homes.write_record, teacher.home, teacher.record))

    def _ended(self, teacher: Teacher, outcome: Outcome, complaint: str, *, listened: bool) -> None:
        """Judge the end of a teacher that nobody stopped."""
        code = outcome.code if isinstance(outcome, Exited) else None
        how = "it disappeared" if code is None else f"it ended with exit code {code}"
        how = f"it was killed by signal {-code}" if code is not None and code < 0 else how
        moved = bool(teacher.record.port)
        self._died(teacher, how if listened or (code or 0) < 0 else f"{how}: {complaint}")
        if not listened and moved:
            # Perhaps somebody else has its port by now.
            teacher.record = replace(teacher.record, port=0)
        elif not listened and (code == ExitCode.USAGE or teacher.deaths > self._policy.retries):
            teacher.failure = f"teacher.model: its teacher cannot be started: {complaint}"

    def _died(self, teacher: Teacher, trouble: str) -> None:
        teacher.runs, teacher.address, teacher.stage, teacher.trouble = False, "", "", trouble
        pause = 0.0
        if teacher.deaths:
            doubled = self._policy.backoff * 2 ** min(30, teacher.deaths - 1)
            pause = min(self._policy.longest_backoff, doubled)
        teacher.deaths += 1
        teacher.rests_until = time.monotonic() + pause
        log.warning("teacher %s: %s; next start in %g s", teacher.key, trouble, pause)

    async def _begin(self, teacher: Teacher) -> None:
        """Start the next attempt of a teacher."""
        await self._files.start(partial(self._begin_now, teacher))
        teacher.runs, teacher.since, teacher.found = True, time.time(), False
        if teacher.stops:  # meanwhile
            self.stop(teacher)

    def _begin_now(self, teacher: Teacher) -> None:
        """Write the record of the next attempt and start it; blocking."""
        last = homes.read_record(teacher.home)
        attempt = max(teacher.record.attempt, last.attempt if last else 0) + 1
        teacher.record = replace(teacher.record, attempt=attempt)
        homes.write_record(teacher.home, teacher.record)
        threads = Share(self._machine.cpus_per_job, teacher.record.gpus)
        self._runner.start(
            teacher.home, attempt=attempt, processes=1, from_step=None, share=threads
        )

    def _is_idle(self, teacher: Teacher) -> bool:
        late = time.monotonic() - teacher.used_at > self._policy.linger
        return late and not teacher.record.kept

    def _is_needed(self, teacher: Teacher) -> bool:
        return teacher.record.kept or teacher.key in self._used
