"""Starts queued jobs, follows running jobs, and retries or ends them.

The scheduler keeps no state that a restarted server needs: jobs are in the store, and the state of
attempts is in the run directories. SQLite is read on the event loop (well under a millisecond), the
run directories in threads: one that does not answer holds up its own job only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clients.config.kinds import AnyJob, processes_of
from clients.config.tables.after import outputs_in
from clients.jobs.job import Job, JobState
from clients.runs.directory import Control, RunDirectory, Status, replace_file
from clients.runs.metrics_follower import MetricsTail
from clients.runs.started_teacher import write_address
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.observation import observe
from distill_server.jobs.preflight import Preflight, accept_all
from distill_server.jobs.progress import progress_changes
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import ACTIVE, Attempt, Change, JobStore
from distill_server.jobs.verdict import AttemptDied, JobEnded, verdict_of
from distill_server.jobs.waiting import Waits, format_clock, format_given_up
from distill_server.people.quotas import Quotas
from distill_server.pipelines.linking import with_paths
from distill_server.policy import Policy as Policy
from distill_server.runners.interface import Runner, Running
from distill_server.start_order import Due, StartOrder
from distill_server.teachers.needs import TeacherNeeds
from distill_server.teachers.started import StartedTeachers
from protos.errors import DistillError, Unavailable
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)

# The pause after an error, before a job is polled again.
_TROUBLE_SECONDS = 5.0
# At the end of the server, for reads and starts that have begun.
_LAST_SECONDS = 3.0

_T = TypeVar("_T")


class Scheduler:
    """The task that starts, polls and ends jobs. One instance per server, on the event loop."""

    def __init__(
        self,
        store: JobStore,
        runs: Path,
        runner: Runner,
        policy: Policy,
        quotas: Quotas,
        preflight: Preflight = accept_all,
        files: RunFiles | None = None,
    ) -> None:
        """`preflight` says when a job that waits for a teacher can start."""
        self._store = store
        self._runs = runs
        self._runner = runner
        self._policy = policy
        self._files = files or RunFiles()
        self._awake = asyncio.Event()
        self.waits = Waits(
            store,
            runs,
            preflight,
            self.wake,
            pause=policy.wait,
            longest_pause=policy.longest_wait,
            give_up_after=policy.give_up_after,
        )
        self.teachers = StartedTeachers(runs, policy, self._files, self.wake)
        needs = TeacherNeeds(store, runs, self.teachers, self._files, self.wake)
        self.order = StartOrder(
            *(store, policy.machine, self.waits, needs),
            *(self._is_left_alone, self._boundary, quotas),
        )
        # By job: one task at a time reads or writes its run directory.
        self._work: dict[str, asyncio.Task[None]] = {}
        # Jobs whose run directories do not answer.
        self._silent: set[str] = set()
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        # The monotonic time until which an attempt waits for its retry. Not stored: a restarted
        # server retries at once.
        self._resting: dict[tuple[str, int], float] = {}
        # The monotonic time at which a cancelled attempt is killed.
        self._kill_at: dict[tuple[str, int, str], float] = {}

    def wake(self) -> None:
        """Make the scheduler poll at once. Call it on the event loop."""
        self._awake.set()

    async def run(self) -> None:
        """Schedule jobs until the task is cancelled. Trainers keep running after that."""
        try:
            while True:
                self._awake.clear()
                try:
                    pause = self._policy.look_every if await self.look() else None
                except Exception:
                    log.exception("cannot poll the jobs; retrying in %g s", _TROUBLE_SECONDS)
                    pause = _TROUBLE_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._awake.wait()
        finally:
            await self._close()

    async def look(self) -> bool:
        """Poll all active jobs and start queued ones; return False if there is no job to poll."""
        active = self._store.in_state(*ACTIVE)
        for job in active:
            if job.id not in self._work and not self.rest(job):
                self._do(job, self._follow(job))
        await self._done()
        await self.teachers.look(self._store.users_of_teachers())
        self.waits.look()
        self._settle_dependents()
        queue = self._start_queued()
        await self._done()
        return queue or bool(active) or len(self.teachers) > 0

    def _do(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                with self._boundary(job):
                    await work
            finally:
                del self._work[job.id]

        self._work[job.id] = asyncio.create_task(guarded())

    async def _done(self) -> None:
        """Wait for the work on all jobs, for a short time, as it goes on by itself."""
        tasks = [task for job_id, task in self._work.items() if job_id not in self._silent]
        if tasks:
            await asyncio.wait(tasks, timeout=self._policy.look_every)

    async def _close(self) -> None:
        self.waits.close()
        await self.teachers.close()
        await self._done()
        tasks = list(self._work.values())
        if set(self._work) - self._silent:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, job: Job, call: Callable[[], _T]) -> _T:
        """Return the result of a call that reads or writes the run directory of a job.

        After a few seconds without a result the job's phase says so. The call is never repeated
        before it has returned, so that a job keeps one thread at most.
        """
        future = self._files.start(call)
        await asyncio.wait({future}, timeout=self._files.answer_seconds)
        if not future.done():
            self._silent.add(job.id)
            try:
                phase = f"WAITING run directory: no answer since {format_clock(self._store.now())}"
                log.warning("job %s: %s", job.id, phase)
                with contextlib.suppress(Unavailable):
                    self._store.change(job.id, Change(phase=phase))
                await asyncio.wait({future})
            finally:
                self._silent.discard(job.id)
        return future.result()

    def _settle_dependents(self) -> None:
        """Say what jobs wait for that come after others; cancel those that cannot start."""
        if not self._store.dependencies.changed:
            return
        stale_jobs = self._store.dependencies.stale()
        for stale in stale_jobs:
            change = Change(phase=stale.phase)
            if stale.reason:
                change = Change(JobState.CANCELLED, reason=stale.reason, phase="")
            self._store.change(stale.job_id, change)
        # One that was cancelled may have others behind it.
        self._store.dependencies.changed = any(stale.reason for stale in stale_jobs)

    def _start_queued(self) -> bool:
        """Start the jobs whose turn it is; return False if the queue was empty."""
        queued = self._store.queue_length() > 0
        for due in self.order.due():
            with self._boundary(due.job):
                self._start(due)
        return queued

    def rest(self, job: Job) -> float:
        """Return for how many seconds a job is left alone after a failure; 0 if it is not."""
        return max(0.0, self._resting.get((job.id, job.attempt), 0.0) - time.monotonic())

    def _is_left_alone(self, job: Job) -> bool:
        return bool(self.rest(job)) or job.id in self._work

    @contextlib.contextmanager
    def _boundary(self, job: Job) -> Iterator[None]:
        """Log the errors of one job, so that a defect or a full disk does not stop the others.

        The metrics that were read and not stored are read again.
        """
        try:
            yield
        except Exception:
            log.exception("job %s: cannot poll it; retrying in %g s", job.id, _TROUBLE_SECONDS)
            self._resting[job.id, job.attempt] = time.monotonic() + _TROUBLE_SECONDS
            self._tails.pop((job.id, job.attempt), None)

    def _start(self, due: Due) -> None:
        # Write the record before starting the process. A server that dies between the two leaves a
        # job that never started, and the next server queues it again. In the other order, the next
        # server would start the job a second time.
        change = Change(JobState.PREPARING, reason="", phase="starting the trainer")
        job = self._store.begin_attempt(due.job, due.share, change, due.teacher)
        failpoint("start-stored")
        self._do(job, self._launch(job, self._store.attempt(job), due))

    async def _launch(self, job: Job, attempt: Attempt, due: Due) -> None:
        try:
            config = parse_config(job.config_json)
            before = {output.job: self._store.job(output.job) for output in outputs_in(config)}
            launch = partial(self._launch_now, job, attempt, due, config, before)
            await self._answer(job, launch)
        except (OSError, ValueError) as error:
            # A full disk, no free processes, or a configuration written by an older version. Only
            # `strerror`: users should not see the server's paths.
            why = (isinstance(error, OSError) and error.strerror) or error
            self._died(
                job, AttemptDied(f"the trainer could not be started: {why}", blameless=False)
            )
        except DistillError as error:  # the output of another job is not there any more
            self._end(job, JobEnded(JobState.FAILED, str(error)), job.step)

    def _launch_now(
        self, job: Job, attempt: Attempt, due: Due, config: AnyJob, before: Mapping[str, Job]
    ) -> None:
        """Write the files of an attempt and start it; blocking."""
        run = self._run(job)
        config = with_paths(config, self._runs, before)
        if attempt.number == 1:
            # The directory is not made durably, so a power cut may have removed it.
            run.path.mkdir(mode=0o700, exist_ok=True)
        run.write_control(Control())
        replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
        if due.address:
            write_address(run.path, due.address)
        failpoint("job-written")
        self._runner.start(
            run,
            attempt=attempt.number,
            processes=processes_of(config),
            from_step=attempt.from_step,
            share=due.share,
        )
        failpoint("trainer-started")

    async def _follow(self, job: Job) -> None:
        run = self._run(job)
        cancelling = job.state is JobState.CANCELLING
        look = partial(
            observe, self._runner, run, job.attempt, self._tail(job, run), cancelling=cancelling
        )
        seen = await self._answer(job, look)
        job = self._store.job(job.id)  # somebody may have cancelled it meanwhile
        waits = seen.outcome.phase if isinstance(seen.outcome, Running) else ""
        changes = progress_changes(job, seen.status, seen.points, waits)
        if changes:
            job = self._store.change(job.id, *changes)
            failpoint("progress-stored")
        if isinstance(seen.outcome, Running):
            if cancelling:
                await self._press(job, run, seen.stop)
            return
        step = self._reached(job, seen.status)
        match verdict_of(job.state, step, seen.status, seen.outcome):
            case JobEnded() as ended:
                self._end(job, ended, step)
            case AttemptDied() as died:
                self._died(job, died, seen.log_end)
        self._forget(job)

    def _reached(self, job: Job, status: Status | None) -> int:
        """Return the newest step of this attempt, or the job's step if the attempt made none."""
        told = status.step if status is not None else 0
        return max(told, self._store.attempt(job).seen_step) if told else job.step

    def _tail(self, job: Job, run: RunDirectory) -> MetricsTail:
        key = (job.id, job.attempt)
        if key not in self._tails:
            seen = self._store.attempt(job).seen_step
            self._tails[key] = MetricsTail(run.metrics, attempt=job.attempt, seen_step=seen)
        return self._tails[key]

    async def _press(self, job: Job, run: RunDirectory, stop: str) -> None:
        """Kill the trainer of a cancelled job once its grace period is over."""
        grace = self._policy.cancel_now_grace if stop == "now" else self._policy.cancel_grace
        kill_at = self._kill_at.setdefault((job.id, job.attempt, stop), time.monotonic() + grace)
        if time.monotonic() >= kill_at:
            end = partial(self._runner.stop, run, job.attempt, now=stop == "now")
            await self._answer(job, end)

    def _end(self, job: Job, ended: JobEnded, step: int) -> None:
        """Record the end of a job, with the states that a fast trainer passed between two polls."""
        changes = []
        if job.state is JobState.PREPARING and ended.state is JobState.SUCCEEDED:
            changes.append(Change(JobState.RUNNING))
        if job.state is not JobState.CANCELLING and ended.state is JobState.CANCELLED:
            changes.append(Change(JobState.CANCELLING))
        changes.append(Change(ended.state, reason=ended.reason, phase="", step=step))
        failpoint("end-seen")
        self._store.change(job.id, *changes)
        self.waits.end(job)
        failpoint("end-stored")

    def _died(self, job: Job, died: AttemptDied, log_end: str = "") -> None:
        """Queue the job again, or fail it if no retries are left or it waited for too long."""
        job = self._store.job(job.id)
        if job.state is JobState.CANCELLING:
            reason = f"cancelled; {died.reason}"
            self._store.change(job.id, Change(JobState.CANCELLED, reason=reason, phase=""))
            return
        attempt, progressed = self._store.attempt(job), self._store.has_progressed(job)
        retries = (0 if progressed else attempt.retries) + (not died.blameless)
        since = (not progressed and attempt.waiting_since) or self._store.now()
        reason = ""
        if died.blameless and self.waits.must_give_up(since):
            reason = format_given_up(died.reason, since)
        elif retries > self._policy.retries:
            reason = died.reason + (f"; its log ends with:\n{log_end}" if log_end else "")
        if reason:
            self._store.change(job.id, Change(JobState.FAILED, reason=reason, phase=""))
            self.waits.end(job)
            return
        # If the attempt made steps, the retry resumes from the newest checkpoint, not from the step
        # that the user asked for.
        again = Attempt(
            job.attempt + 1,
            retries,
            attempt.from_step if attempt.seen_step < 0 else None,
            waiting_since=since if died.blameless else 0.0,
            waits_for=died.waits_for,
        )
        if died.waits_for:
            phase = self.waits.begin(job, again, progressed=progressed)
        else:
            self.waits.end(job)
            doubled = self._policy.backoff * 2 ** min(30, max(0, retries - 1))
            pause = min(self._policy.longest_backoff, doubled)
            phase = f"retrying in {pause:g} s"
            self._resting[job.id, again.number] = time.monotonic() + pause
        change = Change(JobState.QUEUED, reason=died.reason, phase=phase)
        self._store.queue_again(job.id, again, change, at_end=False)
        failpoint("retry-stored")

    def _forget(self, job: Job) -> None:
        self._tails.pop((job.id, job.attempt), None)
        for stop in ("", "checkpoint", "now"):
            self._kill_at.pop((job.id, job.attempt, stop), None)

    def _run(self, job: Job) -> RunDirectory:
        return RunDirectory(self._runs / job.id)
