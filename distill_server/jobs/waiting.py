"""Jobs that wait for a teacher or another service: the preflight is repeated until it succeeds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clients.config.tables.after import outputs_in
from clients.jobs.job import Job, JobState
from clients.preflight.disk import TooLittleSpace
from clients.teacher.client import TeacherNotReady
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.preflight import Preflight
from distill_server.jobs.store import Attempt, Change, JobStore
from distill_server.pipelines.linking import with_paths
from protos.errors import DistillError, Unavailable, is_infrastructure

log = logging.getLogger(__name__)

# The largest number of preflights at the same time.
_MAX_TRIES = 16


@dataclass
class _Wait:
    """The wait of one attempt.

    - pause: seconds before the next try.
    - next_at: time of the next try, on the monotonic clock.
    """

    attempt: Attempt
    pause: float
    next_at: float
    task: asyncio.Task[None] | None = None
    is_over: bool = False


class Waits:
    """Decides whether queued attempts must wait for a service. Call all methods on the event loop.

    The preflight of a waiting job is tried again after `pause` seconds. The pause is doubled after
    each failed try, up to `longest_pause`. A job that has made no step for `give_up_after` seconds
    is FAILED.
    """

    def __init__(
        self,
        store: JobStore,
        runs: Path,
        preflight: Preflight,
        wake: Callable[[], None],
        *,
        pause: float,
        longest_pause: float,
        give_up_after: float,
    ) -> None:
        self._store = store
        self._runs = runs
        self._preflight = preflight
        self._wake = wake
        self._pause = pause
        self._longest_pause = longest_pause
        self._give_up_after = give_up_after
        # Restore the waits that an earlier server stored.
        self._waits = {
            job.id: self._create_wait(store.attempt(job), 0.0) for job in store.waiting_jobs()
        }

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, job: Job, attempt: Attempt, *, has_progressed: bool) -> str:
        """Begin the wait of the next attempt of a job and return the phase of the job.

        If the previous attempt made progress (`has_progressed`), the wait begins with the shortest
        pause. Otherwise, it begins with twice the last pause of the previous wait, up to the
        longest pause.
        """
        previous_wait = None if has_progressed else self._waits.get(job.id)
        self._waits[job.id] = wait = self._create_wait(
            attempt, previous_wait.pause if previous_wait else 0.0
        )
        return _format_phase(wait)

    def begin_at_submit(self, job: Job, problem: DistillError) -> Job:
        """Begin the wait of a new job for a teacher that cannot be used yet; return the job.

        If the job's phase cannot be written, the job waits with its old phase: the job is already
        queued.
        """
        wait = self._waits[job.id] = self._create_wait(self._store.attempt(job), 0.0)
        try:
            return self._store.change(job.id, Change(phase=_format_phase(wait, problem.message)))
        except Unavailable as error:  # a full disk
            log.warning("job %s: cannot write its phase: %s", job.id, error)
            return job

    def is_waiting(self, job: Job) -> bool:
        """Return True if this QUEUED job must wait."""
        wait = self._waits.get(job.id)
        return wait is not None and wait.attempt.number == job.attempt and not wait.is_over

    def end(self, job: Job) -> None:
        """Remove the wait of a job that made progress or has ended."""
        self._waits.pop(job.id, None)

    def must_give_up(self, since: float) -> bool:
        """Return True if a job without progress since the Unix time `since` must be FAILED."""
        return self._store.now() - since > self._give_up_after

    def start_due_tries(self) -> None:
        """Start the preflight of each waiting job whose pause is over."""
        running_tries = sum(wait.task is not None for wait in self._waits.values())
        for job_id, wait in list(self._waits.items()):
            is_due = not wait.is_over and wait.task is None and time.monotonic() >= wait.next_at
            if not is_due or running_tries >= _MAX_TRIES:
                continue
            if not (self._store.has(job_id) and _is_queued(job := self._store.job(job_id), wait)):
                # The job was cancelled, or cancelled and removed.
                del self._waits[job_id]
                continue
            running_tries += 1
            wait.task = asyncio.create_task(self._try_again(job, wait))

    async def finish_tries(self) -> None:
        """Wait for the end of all tries that have begun."""
        tasks = [wait.task for wait in self._waits.values() if wait.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """Cancel all tries."""
        for wait in self._waits.values():
            if wait.task is not None:
                wait.task.cancel()

    async def _try_again(self, job: Job, wait: _Wait) -> None:
        try:
            problem = await self._find_problem(job, wait.attempt.waits_for)
            job = self._store.job(job.id)
            if _is_queued(job, wait):
                self._apply_try(job, wait, problem)
        except Exception:  # the database is full, for example
            log.exception("job %s: cannot record what it waits for", job.id)
            wait.next_at = time.monotonic() + wait.pause
        finally:
            wait.task = None
        if wait.is_over:
            self._wake()

    async def _find_problem(self, job: Job, waits_for: str) -> DistillError | None:
        """Return the error because of which the job must wait; None if the job can start.

        The result is also None for a problem that waiting cannot solve: the trainer reports such a
        problem. `waits_for` is the value of `Attempt.waits_for`.
        """
        try:
            config = parse_config(job.config_json)
            jobs_read = {output.job: self._store.job(output.job) for output in outputs_in(config)}
            config = await asyncio.to_thread(with_paths, config, self._runs, jobs_read)
            await self._preflight(config, self._runs / job.id)
        except TooLittleSpace as error:
            return error if waits_for == "disk" else None
        except DistillError as error:
            return error if is_infrastructure(error.code) else None
        except Exception:
            log.exception("job %s: the preflight failed", job.id)
        return None

    def _apply_try(self, job: Job, wait: _Wait, problem: DistillError | None) -> None:
        since = wait.attempt.waiting_since
        if problem is None:
            self._store.change(job.id, Change(phase=""))
            wait.is_over = True
        elif self.must_give_up(since):
            reason = format_given_up(str(problem), since)
            self._store.change(job.id, Change(JobState.FAILED, reason=reason, phase=""))
            del self._waits[job.id]
        else:
            if not isinstance(problem, TeacherNotReady):  # keep the pause: users see the progress
                wait.pause = min(self._longest_pause, 2 * wait.pause)
            wait.next_at = time.monotonic() + wait.pause
            if job.phase != (phase := _format_phase(wait, problem.message)):
                self._store.change(job.id, Change(phase=phase))

    def _create_wait(self, attempt: Attempt, last_pause: float) -> _Wait:
        pause = min(self._longest_pause, max(self._pause, 2 * last_pause))
        return _Wait(attempt, pause, time.monotonic() + pause)


def format_given_up(reason: str, since: float) -> str:
    """Return the reason of a job that FAILED because it waited too long."""
    day = time.strftime("%Y-%m-%d", time.gmtime(since))
    return f"{reason}; given up: no progress since {day} {format_clock(since)} (--give-up-after)"


def format_clock(seconds: float) -> str:
    """Return the time of day of a Unix time, such as `12:03 UTC`."""
    return time.strftime("%H:%M UTC", time.gmtime(seconds))


def _is_queued(job: Job, wait: _Wait) -> bool:
    return job.state is JobState.QUEUED and job.attempt == wait.attempt.number


def _format_phase(wait: _Wait, problem: str = "no answer") -> str:
    """Return the phase of a waiting job. `problem` is the error message of the last try."""
    since, subject = format_clock(wait.attempt.waiting_since), wait.attempt.waits_for
    return f"WAITING {subject}: {problem} since {since}; next try in {wait.pause:g} s"
