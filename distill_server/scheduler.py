"""Starts queued jobs, follows running jobs, and retries or ends them.

A restarted server needs no state of the old scheduler: jobs are in the store, and the state of
attempts is in the run directories. The event loop reads SQLite, which takes well under a
millisecond. Threads read the run directories, so a directory that does not answer delays only its
own job.
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

from clients.config.kinds import AnyJob
from clients.config.tables.after import outputs_in
from clients.jobs.job import Job, JobState
from clients.runs.directory import Control, RunDirectory, Status, replace_file
from clients.runs.metrics_file import MetricsTail
from clients.runs.started_services import write_address
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.observation import observe, progress_changes
from distill_server.jobs.preflight import Preflight, accept_all
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import ACTIVE, Attempt, Change, JobStore
from distill_server.jobs.verdict import DeadAttempt, JobEnded, verdict_of
from distill_server.jobs.verdict import Policy as Policy
from distill_server.jobs.waiting import Waits, format_clock, format_given_up
from distill_server.people.quotas import Quotas
from distill_server.pipelines.linking import with_paths
from distill_server.runners.interface import Runner, Running
from distill_server.start_order import DueJob, StartOrder
from distill_server.teachers.needs import TeacherNeeds
from distill_server.teachers.started import StartedTeachers
from protos.errors import DistillError, Unavailable
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)

# The pause after an error, before a job is polled again.
_TROUBLE_SECONDS = 5.0
# At its end, the server waits at most this long for the tasks of jobs that have begun.
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
        """`preflight` checks whether a job that waits for a teacher can start."""
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
            store,
            policy.machine,
            waits=self.waits,
            needs=needs,
            is_resting=self._is_resting,
            boundary=self._contain_errors,
            quotas=quotas,
        )
        # The task of each job; at most one task at a time reads or writes a run directory.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        # Jobs whose run directories do not answer.
        self._silent_jobs: set[str] = set()
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        # The monotonic time until which an attempt waits for its retry. Not stored: a restarted
        # server retries at once.
        self._rest_until: dict[tuple[str, int], float] = {}
        # The monotonic time at which a cancelled attempt is killed.
        self._kill_at: dict[tuple[str, int, str], float] = {}

        # Called before the end of an attempt is judged; see JobControl.store_late_cancels.
        self.store_late_cancels: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """Make the scheduler poll at once. Call it on the event loop."""
        self._awake.set()

    async def run(self) -> None:
        """Schedule jobs until the task is cancelled. Trainers continue to run."""
        try:
            while True:
                self._awake.clear()
                try:
                    pause = self._policy.poll_every if await self.run_once() else None
                except Exception:
                    log.exception("cannot poll the jobs; retrying in %g s", _TROUBLE_SECONDS)
                    pause = _TROUBLE_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._awake.wait()
        finally:
            await self._end_tasks()

    async def stop_trainers(self, grace: float) -> None:
        """Start no more jobs, and request each trainer to write a checkpoint and to end.

        Returns when all trainers have ended and their jobs are queued again, or after `grace`
        seconds. `run` must be running.

        A trainer that needs longer than `grace` still follows the request. The next server
        continues its job after the trainer has ended, or has died with the server's container.
        """
        self._is_stopping = True
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._store.in_state(*ACTIVE):
                    await asyncio.sleep(self._policy.poll_every)
        for job in self._store.in_state(*ACTIVE):
            log.warning("job %s: its trainer has not ended %g s after the request", job.id, grace)

    async def run_once(self) -> bool:
        """Poll all active jobs and start queued jobs.

        Returns False if there is nothing to poll: no active or queued job, and no teacher.
        """
        active = self._store.in_state(*ACTIVE)
        for job in active:
            if job.id not in self._tasks and not self.rest_seconds(job):
                self._run_task(job, self._follow_job(job))
        await self._wait_for_tasks()
        await self.teachers.poll_all(self._store.users_of_teachers())
        self.waits.start_due_tries()
        self._update_dependents()
        has_queue = not self._is_stopping and self._start_queued()
        await self._wait_for_tasks()
        return has_queue or bool(active) or len(self.teachers) > 0

    def _run_task(self, job: Job, coroutine: Coroutine[Any, Any, None]) -> None:
        async def run_guarded() -> None:
            try:
                with self._contain_errors(job):
                    await coroutine
            finally:
                del self._tasks[job.id]

        self._tasks[job.id] = asyncio.create_task(run_guarded())

    async def _wait_for_tasks(self) -> None:
        """Wait a short time for the tasks of all jobs; they continue in the background."""
        tasks = [task for job_id, task in self._tasks.items() if job_id not in self._silent_jobs]
        if tasks:
            await asyncio.wait(tasks, timeout=self._policy.poll_every)

    async def _end_tasks(self) -> None:
        self.waits.close()
        await self.teachers.close()
        await self._wait_for_tasks()
        tasks = list(self._tasks.values())
        if set(self._tasks) - self._silent_jobs:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call_files(self, job: Job, call: Callable[[], _T]) -> _T:
        """Return the result of a call that reads or writes the run directory of a job.

        After a few seconds without a result, the job's phase says that the directory does not
        answer. The call is made only once, however long it takes, so that a job blocks at most one
        thread.
        """
        future = self._files.start(call)
        await asyncio.wait({future}, timeout=self._files.answer_seconds)
        if not future.done():
            self._silent_jobs.add(job.id)
            try:
                phase = f"WAITING run directory: no answer since {format_clock(self._store.now())}"
                log.warning("job %s: %s", job.id, phase)
                with contextlib.suppress(Unavailable):
                    self._store.change(job.id, Change(phase=phase))
                await asyncio.wait({future})
            finally:
                self._silent_jobs.discard(job.id)
        return future.result()

    def _update_dependents(self) -> None:
        """Update the phases of jobs that depend on others; cancel those that cannot start."""
        if not self._store.dependencies.is_changed:
            return
        stale_jobs = self._store.dependencies.find_stale_jobs()
        for stale_job in stale_jobs:
            change = Change(phase=stale_job.phase)
            if stale_job.reason:
                change = Change(JobState.CANCELLED, reason=stale_job.reason, phase="")
            self._store.change(stale_job.job_id, change)
        # Other jobs may depend on a cancelled job.
        self._store.dependencies.is_changed = any(stale_job.reason for stale_job in stale_jobs)

    def _start_queued(self) -> bool:
        """Start the queued jobs that `StartOrder` selects. Returns False if the queue was empty."""
        has_queue = self._store.queue_length() > 0
        for due in self.order.due_jobs():
            with self._contain_errors(due.job):
                self._start_job(due)
        return has_queue

    def rest_seconds(self, job: Job) -> float:
        """Return the seconds until the retry of a job after a failure; 0 without a failure."""
        return max(0.0, self._rest_until.get((job.id, job.attempt), 0.0) - time.monotonic())

    def _is_resting(self, job: Job) -> bool:
        return bool(self.rest_seconds(job)) or job.id in self._tasks

    @contextlib.contextmanager
    def _contain_errors(self, job: Job) -> Iterator[None]:
        """Log the errors of one job, so that a defect or a full disk does not stop other jobs.

        If metrics were read but could not be stored, they are read again.
        """
        try:
            yield
        except Exception:
            log.exception("job %s: cannot poll it; retrying in %g s", job.id, _TROUBLE_SECONDS)
            self._rest_until[job.id, job.attempt] = time.monotonic() + _TROUBLE_SECONDS
            self._tails.pop((job.id, job.attempt), None)

    def _start_job(self, due: DueJob) -> None:
        # Write the record before starting the process. A server that dies between these two steps
        # leaves a job that never started, and the next server queues the job again. In the other
        # order, the next server would start the job a second time.
        change = Change(JobState.PREPARING, reason="", phase="starting the trainer")
        job = self._store.begin_attempt(due.job, due.share, change, due.teacher)
        failpoint("start-stored")
        self._run_task(job, self._launch_attempt(job, self._store.attempt(job), due))

    async def _launch_attempt(self, job: Job, attempt: Attempt, due: DueJob) -> None:
        try:
            config = parse_config(job.config_json)
            jobs_read = {output.job: self._store.job(output.job) for output in outputs_in(config)}
            start_attempt = partial(self._launch_blocking, job, attempt, due, config, jobs_read)
            await self._call_files(job, start_attempt)
        except OSError as error:
            # For example, the disk is full or the limit of processes is reached. The reason has
            # only `strerror`, because users should not see the server's paths.
            cause = error.strerror or error
            self._requeue_after_crash(
                job, DeadAttempt(f"the trainer could not be started: {cause}", blameless=False)
            )
        except ValueError as error:  # an older version wrote the configuration; do not retry
            reason = f"the trainer could not be started: {error}"
            self._end_job(job, JobEnded(JobState.FAILED, reason), job.step)
        except DistillError as error:  # the output of another job does not exist any more
            self._end_job(job, JobEnded(JobState.FAILED, str(error)), job.step)

    def _launch_blocking(
        self, job: Job, attempt: Attempt, due: DueJob, config: AnyJob, jobs_read: Mapping[str, Job]
    ) -> None:
        """Write the files of an attempt and start it; blocking."""
        run = self._run_directory(job)
        config = with_paths(config, self._runs, jobs_read)
        if attempt.number == 1:
            # The directory was not created durably, so a power cut may have removed it.
            run.path.mkdir(mode=0o700, exist_ok=True)
        run.write_control(Control())
        replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
        if due.address:
            write_address(run.path, due.address)
        failpoint("job-written")
        self._runner.start(
            run,
            attempt=attempt.number,
            processes=config.processes,
            from_step=attempt.from_step,
            share=due.share,
        )
        failpoint("trainer-started")

    async def _follow_job(self, job: Job) -> None:
        run = self._run_directory(job)
        is_cancelling = job.state is JobState.CANCELLING
        poll = partial(
            observe,
            self._runner,
            run,
            job.attempt,
            self._metrics_tail(job, run),
            is_stopping=is_cancelling or self._is_stopping,
            is_cancel=is_cancelling,
        )
        observation = await self._call_files(job, poll)
        self.store_late_cancels()
        job = self._store.job(job.id)  # a user may have cancelled the job meanwhile
        control = observation.control
        if control.cancelled_attempt == job.attempt and job.state is not JobState.CANCELLING:
            # The cancel could not be stored, and the server has restarted since.
            job = self._store.change(job.id, Change(JobState.CANCELLING))
        runner_phase = observation.outcome.phase if isinstance(observation.outcome, Running) else ""
        changes = progress_changes(job, observation.status, observation.points, runner_phase)
        if changes:
            job = self._store.change(job.id, *changes)
            failpoint("progress-stored")
        if isinstance(observation.outcome, Running):
            if is_cancelling:
                await self._kill_after_grace(job, run, control.stop)
            return
        step = self._newest_step(job, observation.status)
        match verdict_of(job.state, step, observation.status, observation.outcome, control.stop):
            case JobEnded() as verdict:
                self._end_job(job, verdict, step)
            case DeadAttempt() as verdict:
                self._requeue_after_crash(job, verdict, observation.log_end)
        self._forget_attempt(job)

    def _newest_step(self, job: Job, status: Status | None) -> int:
        """Return the newest step of this attempt, or the job's step if the attempt made none."""
        reported_step = status.step if status is not None else 0
        return max(reported_step, self._store.attempt(job).seen_step) if reported_step else job.step

    def _metrics_tail(self, job: Job, run: RunDirectory) -> MetricsTail:
        key = (job.id, job.attempt)
        if key not in self._tails:
            seen_step = self._store.attempt(job).seen_step
            self._tails[key] = MetricsTail(run.metrics, attempt=job.attempt, seen_step=seen_step)
        return self._tails[key]

    async def _kill_after_grace(self, job: Job, run: RunDirectory, stop: str) -> None:
        """Kill the trainer of a cancelled job if its grace period is over."""
        grace = self._policy.cancel_now_grace
        if stop != "now":  # the trainer finishes its step first
            grace = self._policy.cancel_grace + 2 * job.metrics.get("time/step", 0.0)
        kill_at = self._kill_at.setdefault((job.id, job.attempt, stop), time.monotonic() + grace)
        if time.monotonic() >= kill_at:
            stop_trainer = partial(self._runner.stop, run, job.attempt, now=stop == "now")
            await self._call_files(job, stop_trainer)

    def _end_job(self, job: Job, verdict: JobEnded, step: int) -> None:
        """Record the end of a job, with the states that a fast trainer passed between two polls."""
        changes = []
        if job.state is JobState.PREPARING and verdict.state is JobState.SUCCEEDED:
            changes.append(Change(JobState.RUNNING))
        if job.state is not JobState.CANCELLING and verdict.state is JobState.CANCELLED:
            changes.append(Change(JobState.CANCELLING))
        changes.append(Change(verdict.state, reason=verdict.reason, phase="", step=step))
        failpoint("end-seen")
        self._store.change(job.id, *changes)
        self.waits.end(job)
        failpoint("end-stored")

    def _requeue_after_crash(self, job: Job, verdict: DeadAttempt, log_end: str = "") -> None:
        """Queue the job again, or fail it if it has no more retries or waited for too long."""
        job = self._store.job(job.id)
        if job.state is JobState.CANCELLING:
            reason = f"cancelled; {verdict.reason}"
            self._store.change(job.id, Change(JobState.CANCELLED, reason=reason, phase=""))
            return
        attempt, has_progressed = self._store.attempt(job), self._store.has_progressed(job)
        retries = (0 if has_progressed else attempt.retries) + (not verdict.blameless)
        # A first attempt waited for its teacher before it was queued, possibly for a long time.
        is_first = attempt.number == 1
        waiting_since = 0.0 if has_progressed or is_first else attempt.waiting_since
        since = waiting_since or self._store.now()
        reason = ""
        if verdict.blameless and self.waits.must_give_up(since):
            reason = format_given_up(verdict.reason, since)
        elif retries > self._policy.retries:
            reason = verdict.reason + (f"; its log ends with:\n{log_end}" if log_end else "")
        if reason:
            self._store.change(job.id, Change(JobState.FAILED, reason=reason, phase=""))
            self.waits.end(job)
            return
        # If the attempt made steps, the retry resumes from the newest checkpoint, not from the step
        # that the user requested.
        next_attempt = Attempt(
            job.attempt + 1,
            retries,
            attempt.from_step if attempt.seen_step < 0 else None,
            waiting_since=since if verdict.blameless else 0.0,
            waits_for=verdict.waits_for,
        )
        if verdict.waits_for:
            phase = self.waits.begin(job, next_attempt, has_progressed=has_progressed)
        else:
            self.waits.end(job)
            backoff = self._policy.backoff * 2 ** min(30, max(0, retries - 1))
            pause = min(self._policy.longest_backoff, backoff)
            phase = "waits for the next server" if self._is_stopping else f"retrying in {pause:g} s"
            self._rest_until[job.id, next_attempt.number] = time.monotonic() + pause
        change = Change(JobState.QUEUED, reason=verdict.reason, phase=phase)
        self._store.queue_again(job.id, next_attempt, change, at_end=False)
        failpoint("retry-stored")

    def _forget_attempt(self, job: Job) -> None:
        self._tails.pop((job.id, job.attempt), None)
        for stop in ("", "checkpoint", "now"):
            self._kill_at.pop((job.id, job.attempt, stop), None)

    def _run_directory(self, job: Job) -> RunDirectory:
        return RunDirectory(self._runs / job.id)
