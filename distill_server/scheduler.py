"""Starts queued jobs, follows running ones, and decides what becomes of them in the end.

It keeps nothing that a restarted server would miss: jobs are in the store, what runs is on disk.
Looks at files and at SQLite take well under a millisecond each, so it makes them on the event loop.
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

# A job whose files cannot be read now is looked at again after this.
_TROUBLE_SECONDS = 5.0
_LOG_TAIL_BYTES, _LOG_TAIL_LINES, _LOG_LINE_CHARS = 4096, 5, 200


@dataclass(frozen=True)
class Policy:
    """What runs at once, and how patient the scheduler is. Times are seconds."""

    machine: Machine = ONE_JOB
    most_queued: int = 10_000
    retries: int = 3
    # Before the first retry; doubled with every further one.
    backoff: float = 10.0
    longest_backoff: float = 360.0
    # From the wish to cancel until the trainer is killed; it writes a checkpoint meanwhile.
    cancel_grace: float = 60.0
    cancel_now_grace: float = 5.0
    look_every: float = 0.2


class Scheduler:
    """The one task that moves jobs. `wake` makes it look at once."""

    def __init__(self, store: Store, runs: Path, runner: Runner, policy: Policy) -> None:
        self._store = store
        self._runs = runs
        self._runner = runner
        self._policy = policy
        self._awake = asyncio.Event()
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        # Monotonic times: until when an attempt rests (a restarted server tries at once), and
        # when a cancelled one is killed.
        self._resting: dict[tuple[str, int], float] = {}
        # Queued jobs that ask for more than this server has.
        self._too_large: set[str] = set()
        self._kill_at: dict[tuple[str, int, str], float] = {}

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled. Trainers do not notice when it ends."""
        while True:
            self._awake.clear()
            try:
                pause = self._policy.look_every if self._look() else None
            except Exception:
                log.exception("cannot look at the jobs: trying again in %g s", _TROUBLE_SECONDS)
                pause = _TROUBLE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._awake.wait()

    def _look(self) -> bool:
        """One round over all jobs that need one; False when there is nothing to wait for."""
        active = self._store.in_state(*ACTIVE)
        for job in active:
            if not self._rests(job):
                with self._boundary(job):
                    self._follow(job)
        return self._start_queued() or bool(active)

    def _start_queued(self) -> bool:
        """Start jobs in the order of the queue; False when it is empty.

        One that must wait for its share lets nobody pass, or a large job would never start. Those
        that rest, or ask for more than a restarted server has, hold nobody up.
        """
        held = list(self._store.held())
        free = max(0, self._policy.machine.slots - len(held))
        # Not more than can be started: there may be ten thousand.
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
        """None where the job must wait; for ever, if it is too large for this server."""
        try:
            config = parse_config(job.config_json)
        except InvalidInput:  # from before an upgrade; its start says so
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
        """Of the errors of one job: a defect, or a full disk, must not stop the others."""
        try:
            yield
        except Exception:
            log.exception("job %s: trying again in %g s", job.id, _TROUBLE_SECONDS)
            self._resting[job.id, job.attempt] = time.monotonic() + _TROUBLE_SECONDS

    def _start(self, job: Job, share: Share) -> None:
        attempt = self._store.attempt(job)
        run = self._run(job)
        # First the record, then the process: a server that dies between the two leaves a job that
        # never started, which the next one queues again; the other way round would start it twice.
        change = Change(JobState.PREPARING, reason="", phase="starting the trainer")
        job = self._store.begin(job, share, change)
        failpoint("start-stored")
        try:
            config = parse_config(job.config_json)
            if attempt.number == 1:
                run.path.mkdir(mode=0o700, exist_ok=True)  # a power cut may have taken it
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
            # No space, no processes, or a config from before an upgrade. No path: it is ours alone.
            why = (isinstance(error, OSError) and error.strerror) or error
            self._died(job, Died(f"the trainer could not be started: {why}", blameless=False))

    def _follow(self, job: Job) -> None:
        run = self._run(job)
        # First the process, then its files: the files of a process that is gone are complete.
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
        """The newest step of this attempt, or the job's if it made none."""
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
        """Kill the trainer of a cancelled job when its grace is over."""
        stop = run.read_control().stop
        graces = {"now": self._policy.cancel_now_grace}
        grace = graces.get(stop, self._policy.cancel_grace)
        kill_at = self._kill_at.setdefault((job.id, job.attempt, stop), time.monotonic() + grace)
        if time.monotonic() >= kill_at:
            self._runner.stop(run, job.attempt, now=stop == "now")

    def _end(self, job: Job, ended: Ended, step: int) -> None:
        """Record the end, by legal transitions: a trainer may be quicker than the looks at it."""
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
        """Queue the job again, or give up."""
        attempt = self._store.attempt(job)
        retries = attempt.retries + (0 if died.blameless else 1)
        if retries > self._policy.retries:
            tail = _last_lines(self._run(job).log_file(job.attempt))
            reason = died.reason + (f"; its log ends with:\n{tail}" if tail else "")
            self._store.change(job.id, Change(JobState.FAILED, reason=reason, phase=""))
            return
        doubled = self._policy.backoff * 2 ** min(30, max(0, retries - 1))
        pause = min(self._policy.longest_backoff, doubled)
        # An attempt that was told where to start, and made steps from there, goes on from its own.
        from_step = attempt.from_step if attempt.seen_step < 0 else None
        self._store.queue_again(
            job.id,
            Attempt(job.attempt + 1, retries, from_step),
            Change(JobState.QUEUED, reason=died.reason, phase=f"trying again in {pause:g} s"),
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
    """The end of a log, short enough for a reason."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip()[:_LOG_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_TAIL_LINES:])
