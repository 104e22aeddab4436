"""`run`: starts a job on this machine in a separate process, and returns its RunHandle.

The process is `distill run --resume DIRECTORY`, in its own session. When Python or the notebook's
kernel exits, the process writes a checkpoint and stops.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from clients.config.file import JobSource, load_job
from clients.jobs.artifacts import Checkpoint, pull_record
from clients.jobs.display.job_display import JobDisplay
from clients.jobs.job import TERMINAL, Job, JobEvent, JobState
from clients.jobs.record import JobRecord, record_of_run
from clients.local.follower import SECONDS_BETWEEN_POLLS, RunFollower
from clients.runs.directory import Control, RunDirectory
from protos.errors import ExitCode, NotFound, TimedOut, WrongState
from protos.operating_system import require_linux

_LOG = "run.log"
_live_attempts: set[_Attempt] = set()


def run(job: JobSource, *, runs: Path | str = "runs", directory: Path | str = "") -> RunHandle:
    """Start a job on this machine, without a server, and return its handle at once.

    - `job`: a job, the result of `load_job`, or a dict, as for `DistillClient.submit`
    - `runs`: parent of a new run directory
    - `directory`: path of the run directory, which must not exist; if it is not "", `runs` is not
      used

    An interrupt (Ctrl-C, or of a notebook's kernel) in `wait`, `watch` or `show` of the handle
    stops the job after a checkpoint. A second interrupt kills the job. The job is also stopped when
    this process exits, except by SIGKILL.

    Raises the errors of `distill run` for a job that cannot start, such as InvalidInput.
    """
    from clients.local.directory import create_run, with_absolute_paths

    require_linux("clients.run")
    # Absolute paths, because the working directory of a notebook may change.
    absolute = str(Path(directory).absolute()) if directory else ""
    file = load_job(job)
    parts = (file.text, file.path.suffix.lower())
    config = with_absolute_paths(file)
    return _start(create_run(config, Path(runs).absolute(), absolute, *parts))


def run_command(directory: Path, max_steps: int | None) -> list[str]:
    """Return the command that runs the next attempt in a run directory."""
    steps = [] if max_steps is None else ["--set", f"max_steps={max_steps}"]
    return [sys.executable, "-P", "-m", "clients", "run", "--resume", str(directory), *steps]


class RunHandle(JobDisplay):
    """A job that `run` has started, with its state at the time of the call.

    The handle has the methods of JobHandle. Its fields do not change while the job runs. `refresh`,
    `wait` and `cancel` return a new handle with new values.
    """

    _attempt: _Attempt  # no field, as JobHandle.client

    @property
    def directory(self) -> Path:
        """The run directory, with metrics, checkpoints and export."""
        return self._attempt.run.path

    def refresh(self) -> RunHandle:
        """Return the current state of the job."""
        return _handle_of(self._attempt)

    def record(self, *, with_notes: bool = False) -> JobRecord:
        """Read the run directory, and return the job as it is now, with its metrics and notes."""
        return self._attempt.record()

    def watch(self, after_seq: int = 0, *, timeout: float | None = None) -> Iterator[JobEvent]:
        """Yield every event of this attempt with a number above `after_seq`, until the attempt
        ends.

        Raises TimedOut after `timeout` seconds. The job then continues.
        """
        seq = after_seq
        try:
            for event in self._attempt.iterate(after_seq, timeout):
                seq = event.seq
                yield event
        except KeyboardInterrupt:
            self._attempt.stop_and_wait()
            yield from (event for event in self._attempt.poll() if event.seq > seq)
            raise

    def wait(self, timeout: float | None = None) -> RunHandle:
        """Wait until the job ends, and return it. Raises TimedOut after `timeout` seconds."""
        for _ in self.watch(timeout=timeout):
            pass
        return self.refresh()

    def show(self, metrics: Sequence[str] = ()) -> None:
        """Show the job until it ends; see JobDisplay."""
        try:
            super().show(metrics)
        except KeyboardInterrupt:  # in the drawing, too
            self._attempt.stop_and_wait()
            raise

    def history(self) -> Sequence[JobEvent]:
        """Return every event of this attempt up to now."""
        return self._attempt.poll()

    def logs(self, *, attempt: int = 0) -> Iterator[bytes]:
        """Yield the log of an attempt (0: this one). Raises NotFound if there is none."""
        path = self._attempt.run.log_file(attempt or self.attempt)
        try:
            yield path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"job {self.id} has no log of attempt {attempt}") from None

    def cancel(self, *, now: bool = False) -> RunHandle:
        """Stop the job after a last checkpoint, or immediately if `now`. Returns without waiting.

        If a later attempt of the job runs, this method stops the later attempt. If `resume` in this
        process started the later attempt, the returned handle is that of the later attempt.
        """
        newest = _newest_attempt(self._attempt)
        newest.stop(now=now)
        if _has_successor(newest):
            newest.run.write_control(Control("now" if now else "checkpoint"))
        return _handle_of(newest)

    def resume(self, *, max_steps: int | None = None) -> RunHandle:
        """Start a new attempt from the newest checkpoint, and return its handle.

        `max_steps` replaces the job's number of steps. Raises WrongState if the job has not ended,
        if it has finished its steps, or if a later attempt runs.
        """
        from clients.local.directory import require_unfinished

        newest = _newest_attempt(self._attempt)
        job = _handle_of(newest)
        state = "running in another process" if _has_successor(newest) else job.state
        if state not in TERMINAL:
            raise WrongState(f"job {job.id} is {state}", hint="wait for its end, or cancel it")
        require_unfinished(self._attempt.run, max_steps)
        return _start(self._attempt.run, max_steps)

    def pull(self, destination: Path | str, *, checkpoint: Checkpoint | None = None) -> Path:
        """Copy the export or a checkpoint into a new directory; see `pull_run`."""
        record = record_of_run(self.directory)
        if record.job.attempt <= self.attempt:  # the directory lacks a failure before the trainer
            record = self.record()
        return pull_record(record, self.directory, destination, checkpoint=checkpoint)


class _Attempt:
    """The process of one attempt, and its events so far. Several threads can share it."""

    def __init__(
        self, run: RunDirectory, attempt: int, process: subprocess.Popen[bytes], max_steps: int
    ) -> None:
        self.run = run
        self.number = attempt
        self.max_steps = max_steps
        self._process = process
        self._follower = RunFollower(run, attempt, max_steps)
        self._events: list[JobEvent] = []
        self._stop_requested = self._has_ended = False
        self._lock = threading.Lock()

    def poll(self) -> list[JobEvent]:
        """Return every event up to now."""
        with self._lock:
            if not self._has_ended:
                # The process before its files, to miss nothing written before its end.
                self._has_ended = self._process.poll() is not None
                self._events += self._follower.poll()
                if self._has_ended and not self._follower.over:
                    self._events.append(self._follower.trainer_died(*self._final_reason()))
                if self._has_ended:
                    _live_attempts.discard(self)
            return [*self._events]

    def has_ended(self) -> bool:
        """Return whether the process has exited."""
        self.poll()
        return self._has_ended

    def iterate(self, after_seq: int, timeout: float | None) -> Iterator[JobEvent]:
        """Yield the events with a number above `after_seq` until the attempt ends.

        Raises TimedOut after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            events = self.poll()
            for event in events:
                if event.seq > after_seq:
                    after_seq = event.seq
                    yield event
            if self._has_ended:
                return
            if deadline is not None and time.monotonic() >= deadline:
                hint = "the job continues; watch or cancel the job"
                name = self.run.path.name
                raise TimedOut(f"job {name} did not end within {timeout:g} s", hint=hint)
            time.sleep(SECONDS_BETWEEN_POLLS)

    def __reduce__(self) -> tuple[Any, ...]:
        raise WrongState(
            "a RunHandle cannot be pickled, because the run belongs to the process that started it",
            hint="pass handle.directory, and read the run with record_of_run",
        )

    def stop(self, *, now: bool = False) -> None:
        """Ask the process to stop after a checkpoint, or kill it if `now`.

        Repeated calls have no further effect.
        """
        if not self._stop_requested:
            self._stop_requested = True
            self._process.send_signal(signal.SIGTERM)
        while now and self._process.poll() is None:
            # After the first request, SIGINT kills; before, it would be the first request.
            if self.run.read_control().stop:
                self._process.send_signal(signal.SIGINT)
                return
            time.sleep(SECONDS_BETWEEN_POLLS)

    def stop_and_wait(self) -> None:
        """Cancel the attempt and wait for its end.

        A KeyboardInterrupt during the wait kills the process.
        """
        self.stop()
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self.stop(now=True)
            self._process.wait()
        self.poll()

    def record(self) -> JobRecord:
        """Return the record of the run directory, but with the state of this attempt."""
        events = self.poll()
        record = record_of_run(self.run.path)
        if not events:
            phase = _last_line(self.run.path / _LOG) or "starting"
            job = replace(record.job, state=JobState.PREPARING, phase=phase, reason="")
        else:
            event = events[-1]
            job = replace(
                record.job,
                state=event.state,
                phase="" if event.state in TERMINAL else event.phase,
                reason=event.reason,
                last_seq=event.seq,
            )
        return replace(record, job=replace(job, attempt=self.number, max_steps=self.max_steps))

    def _final_reason(self) -> tuple[str, JobState]:
        code = self._process.returncode
        if self._stop_requested or code == ExitCode.INTERRUPTED:
            return "cancelled without a checkpoint of its last steps", JobState.CANCELLED
        log = self.run.path / _LOG
        line = _last_line(log)
        if line.startswith("error: "):
            return line.removeprefix("error: "), JobState.FAILED
        return f"the run ended with exit code {code}; read {log}", JobState.FAILED


def _start(run: RunDirectory, max_steps: int | None = None) -> RunHandle:
    from clients.local.directory import next_attempt

    attempt = next_attempt(run)
    with (run.path / _LOG).open("wb") as log:
        process = subprocess.Popen(
            run_command(run.path, max_steps),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A session of its own: an interrupt of another cell does not reach it.
            start_new_session=True,
        )
    started = _Attempt(run, attempt, process, max_steps or run.config().max_steps)
    _live_attempts.add(started)
    return _handle_of(started)


@atexit.register
def _stop_all() -> None:
    for attempt in [*_live_attempts]:
        attempt.stop()


def _newest_attempt(attempt: _Attempt) -> _Attempt:
    """Return the attempt that this process runs in the run directory of `attempt`.

    Returns `attempt` itself if this process runs none there.
    """
    others = [other for other in [*_live_attempts] if other.run.path == attempt.run.path]
    return next((other for other in others if not other.has_ended()), attempt)


def _has_successor(attempt: _Attempt) -> bool:
    """Return whether another process runs a later attempt in the run directory of `attempt`."""
    status = attempt.run.read_status()
    is_later = status is not None and status.attempt > attempt.number
    return is_later and attempt.run.is_held()


def _handle_of(attempt: _Attempt) -> RunHandle:
    job = attempt.record().job
    handle = RunHandle(**{field.name: getattr(job, field.name) for field in fields(Job)})
    object.__setattr__(handle, "_attempt", attempt)  # the values are frozen
    return handle


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
