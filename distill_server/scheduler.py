"""Starts queued jobs, follows running jobs, and retries or ends them.

The scheduler keeps no state that a restarted server needs: jobs are in the store, and the state of
attempts is in the run directories. A read of a file or of SQLite takes well under a millisecond, so
the scheduler reads on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.config.kinds import processes_of
from clients.jobs.job import Job, JobState
from clients.runs.directory import Control, RunDirectory, Status, replace_file
from clients.runs.metrics_follower import MetricsTail, Point
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.progress import progress_changes, status_of
from distill_server.jobs.store import ACTIVE, Attempt, Change, Store
from distill_server.jobs.verdict import Died, Ended, verdict_of
from distill_server.runners.interface import Runner, Running
from distill_server.runners.machine import ONE_JOB, Machine, Share
from protos.errors import InvalidInput
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)

# The pause after an error, before a job is polled again.
_TROUBLE_SECONDS = 5.0
_LOG_TAIL_BYTES, _LOG_TAIL_LINES, _LOG_LINE_CHARS = 4096, 5, 200


@dataclass(frozen=True)
class Policy:
    """Limits and times of the scheduler. Times are in seconds.

    `retries` is the number of automatic retries of a job whose trainer died. `backoff` is the pause
    before the first retry; it doubles with each further one, up to `longest_backoff`.
    `cancel_grace` is the time from a cancel to the kill of the trainer, which writes a checkpoint
    meanwhile; `cancel_now_grace` is the time without a checkpoint. `look_every` is the pause
    between two polls.
    """

    machine: Machine = ONE_JOB
    most_queued: int = 10_000
    retries: int = 3
    backoff: float = 10.0
    longest_backoff: float = 360.0
    cancel_grace: float = 60.0
    cancel_now_grace: float = 5.0
    look_every: float = 0.2


class Scheduler:
    """The task that starts, polls and ends jobs. One instance per server, on the event loop."""

    def __init__(self, store: Store, runs: Path, runner: Runner, policy: Policy) -> None:
        self._store = store
        self._runs = runs
        self._runner = runner
        self._policy = policy
        self._awake = asyncio.Event()
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        # The monotonic time until which an attempt waits for its retry. Not stored: a restarted
        # server retries at once.
        self._resting: dict[tuple[str, int], float] = {}
        # Queued jobs that request more than this server has.
        self._too_large: set[str] = set()
        # The monotonic time at which a cancelled attempt is killed.
        self._kill_at: dict[tuple[str, int, str], float] = {}

    def wake(self) -> None:
        """Make the scheduler poll at once. Call it on the event loop."""
        self._awake.set()

    async def run(self) -> None:
        """Schedule jobs until the task is cancelled. Trainers keep running after that."""
        while True:
            self._awake.clear()
            try:
                pause = self._policy.look_every if self._look() else None
            except Exception:
                log.exception("cannot poll the jobs; retrying in %g s", _TROUBLE_SECONDS)
                pause = _TROUBLE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._awake.wait()

    def _look(self) -> bool:
        """Poll all active jobs and start queued ones; return False if there is no job to poll."""
        active = self._store.in_state(*ACTIVE)
        for job in active:
            if not self._rests(job):
                with self._boundary(job):
                    self._follow(job)
        return self._start_queued() or bool(active)

    def _start_queued(self) -> bool:
        """Start jobs in the order of the queue; return False if the queue is empty.

        A job that waits for its share blocks the jobs behind it, because otherwise small jobs could
        delay a large one for ever. Jobs that wait for a retry, or that request more than a
        restarted server has, block no other job.
        """
        held = list(self._store.held())
        free = max(0, self._policy.machine.slots - len(held))
        # Read only as many jobs as can start: the queue may hold ten thousand.
        queued = self._store.in_state(JobState.QUEUED, limit=free and free + self._passed_over())
        for job in queued:
            if self._rests(job) or job.id in self._too_large:
                continue
            with self._boundary(job):
                share = self._share(job, held)
                if share is None:
                    if job.id in self._too_large:
                        continue
                    break
                held.append(share)
                self._start(job, share)
        return bool(queued) or self._store.queue_length() > 0

    def _passed_over(self) -> int:
        now = time.monotonic()
        self._resting = {key: until for key, until in self._resting.items() if now < until}
        return len(self._resting) + len(self._too_large)

    def _share(self, job: Job, held: Sequence[Share]) -> Share | None:
        """Return the job's share, or None if the job must wait.

        A job that is too large for this server waits until a server with more resources runs it.
        """
        try:
            config = parse_config(job.config_json)
        except InvalidInput:  # written by an older version; _start reports the error
            return Share(0, ()) if len(held) < self._policy.machine.slots else None
        try:
            self._policy.machine.require_room(config)
        except InvalidInput as error:
            self._too_large.add(job.id)
            if job.phase != str(error):
                self._store.change(job.id, Change(phase=str(error)))
            return None
        return self._policy.machine.share(config, held)

    def _rests(self, job: Job) -> bool:
        return time.monotonic() < self._resting.get((job.id, job.attempt), 0.0)

    @contextlib.contextmanager
    def _boundary(self, job: Job) -> Iterator[None]:
        """Log the errors of one job, so that a defect or a full disk does not stop the others."""
        try:
            yield
        except Exception:
            log.exception("job %s: cannot poll it; retrying in %g s", job.id, _TROUBLE_SECONDS)
            self._resting[job.id, job.attempt] = time.monotonic() + _TROUBLE_SECONDS

    def _start(self, job: Job, share: Share) -> None:
        attempt = self._store.attempt(job)
        run = self._run(job)
        # Write the record before starting the process. A server that dies between the two leaves a
        # job that never started, and the next server queues it again. In the other order, the next
        # server would start the job a second time.
        change = Change(JobState.PREPARING, reason="", phase="starting the trainer")
        job = self._store.begin(job, share, change)
        failpoint("start-stored")
        try:
            config = parse_config(job.config_json)
            if attempt.number == 1:
                # The directory is not made durably, so a power cut may have removed it.
                run.path.mkdir(mode=0o700, exist_ok=True)
            replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
            run.write_control(Control())
            failpoint("job-written")
            self._runner.start(
                run,
                attempt=attempt.number,
                processes=processes_of(config),
                from_step=attempt.from_step,
                share=share,
            )
            failpoint("trainer-started")
        except (OSError, ValueError) as error:
            # A full disk, no free processes, or a configuration written by an older version. Only
            # `strerror`: users should not see the server's paths.
            why = (isinstance(error, OSError) and error.strerror) or error
            self._died(job, Died(f"the trainer could not be started: {why}", blameless=False))

    def _follow(self, job: Job) -> None:
        run = self._run(job)
        # Poll the process before reading its files: if it has ended, the files are complete.
        outcome = self._runner.poll(run, job.attempt)
        status = status_of(run, job.attempt)
        points = self._points(job, run, complete=not isinstance(outcome, Running))
        waits = outcome.phase if isinstance(outcome, Running) else ""
        changes = progress_changes(job, status, points, waits)
        if changes:
            job = self._store.change(job.id, *changes)
            failpoint("progress-stored")
        if isinstance(outcome, Running):
            if job.state is JobState.CANCELLING:
                self._press(job, run)
            return
        step = self._reached(job, status)
        match verdict_of(job.state, step, status, outcome):
            case Ended() as ended:
                self._end(job, ended, step)
            case Died() as died:
                self._died(job, died)
        self._forget(job)

    def _reached(self, job: Job, status: Status | None) -> int:
        """Return the newest step of this attempt, or the job's step if the attempt made none."""
        told = status.step if status is not None else 0
        return max(told, self._store.attempt(job).seen_step) if told else job.step

    def _points(self, job: Job, run: RunDirectory, *, complete: bool) -> Sequence[Point]:
        key = (job.id, job.attempt)
        if key not in self._tails:
            seen = self._store.attempt(job).seen_step
            self._tails[key] = MetricsTail(run.metrics, attempt=job.attempt, seen_step=seen)
        tail = self._tails[key]
        return tail.read_all() if complete else tail.read()

    def _press(self, job: Job, run: RunDirectory) -> None:
        """Kill the trainer of a cancelled job once its grace period is over."""
        stop = run.read_control().stop
        graces = {"now": self._policy.cancel_now_grace}
        grace = graces.get(stop, self._policy.cancel_grace)
        kill_at = self._kill_at.setdefault((job.id, job.attempt, stop), time.monotonic() + grace)
        if time.monotonic() >= kill_at:
            self._runner.stop(run, job.attempt, now=stop == "now")

    def _end(self, job: Job, ended: Ended, step: int) -> None:
        """Record the end of a job, with the states that a fast trainer passed between two polls."""
        changes = []
        if job.state is JobState.PREPARING and ended.state is JobState.SUCCEEDED:
            changes.append(Change(JobState.RUNNING))
        if job.state is not JobState.CANCELLING and ended.state is JobState.CANCELLED:
            changes.append(Change(JobState.CANCELLING))
        changes.append(Change(ended.state, reason=ended.reason, phase="", step=step))
        failpoint("end-seen")
        self._store.change(job.id, *changes)
        failpoint("end-stored")

    def _died(self, job: Job, died: Died) -> None:
        """Queue the job again, or fail it if no retries are left."""
        attempt = self._store.attempt(job)
        retries = attempt.retries + (0 if died.blameless else 1)
        if retries > self._policy.retries:
            tail = _last_lines(self._run(job).log_file(job.attempt))
            reason = died.reason + (f"; its log ends with:\n{tail}" if tail else "")
            self._store.change(job.id, Change(JobState.FAILED, reason=reason, phase=""))
            return
        doubled = self._policy.backoff * 2 ** min(30, max(0, retries - 1))
        pause = min(self._policy.longest_backoff, doubled)
        # If the attempt made steps, the retry resumes from the newest checkpoint, not from the step
        # that the user asked for.
        from_step = attempt.from_step if attempt.seen_step < 0 else None
        self._store.queue_again(
            job.id,
            Attempt(job.attempt + 1, retries, from_step),
            Change(JobState.QUEUED, reason=died.reason, phase=f"retrying in {pause:g} s"),
            last=False,
        )
        failpoint("retry-stored")
        self._resting[job.id, job.attempt + 1] = time.monotonic() + pause

    def _forget(self, job: Job) -> None:
        self._tails.pop((job.id, job.attempt), None)
        for stop in ("", "checkpoint", "now"):
            self._kill_at.pop((job.id, job.attempt, stop), None)

    def _run(self, job: Job) -> RunDirectory:
        return RunDirectory(self._runs / job.id)


def _last_lines(path: Path) -> str:
    """Return the last lines of a log, short enough for a job's reason; "" if there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip()[:_LOG_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_TAIL_LINES:])
