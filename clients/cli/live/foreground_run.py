"""One attempt of a job in the foreground: its process, events, Ctrl-C, and final event."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from clients.cli.live.display import display
from clients.cli.output import Output
from clients.jobs.job import TERMINAL, JobEvent, JobState
from clients.jobs.view import JobView
from clients.runs.directory import Control, RunDirectory, Status, Verdict
from clients.runs.file_system import delete_abandoned
from clients.runs.launch import trainer_command
from clients.runs.metrics_file import MetricsTail, Point
from protos.errors import ExitCode

_STATES = {
    "running": JobState.RUNNING,
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}

SECONDS_BETWEEN_POLLS = 0.2
# SIGTERM requests a last checkpoint from the trainer; a job server waits for the same time.
SECONDS_TO_STOP = 60.0


class RunFollower:
    """Follows one attempt in a run directory. Each `poll` returns the new events.

    The trainer may rewrite metrics.jsonl at the same time, as it does when it resumes.
    """

    def __init__(self, run: RunDirectory, attempt: int, max_steps: int) -> None:
        self._run = run
        self._attempt = attempt
        self._max_steps = max_steps
        self._status = Status(attempt=attempt, verdict="running", phase="starting")
        self._newest = -1  # the newest step that `poll` returned
        self._tail = MetricsTail(run.metrics, attempt=attempt, seen_step=self._newest)
        self._seq = 0

    @property
    def over(self) -> bool:
        """True if the attempt has ended, according to its status file."""
        return _job_state(self._status) in TERMINAL

    def poll(self) -> Iterator[JobEvent]:
        """Yield the events since the last call."""
        # Status before metrics: if the status says that the attempt has ended, all of its metrics
        # are on disk.
        status = self._run.read_status()
        for point in self._tail.read_all():
            self._newest = point.step
            yield self._make_event(self._status, point)
        if status is not None and status.attempt == self._attempt and status != self._status:
            previous = _job_state(self._status), self._status.phase, self._status.reason
            self._status = status
            if (_job_state(status), status.phase, status.reason) != previous:
                yield self._make_event(status)

    def trainer_died(self, reason: str, state: JobState = JobState.FAILED) -> JobEvent:
        """Return the final event of a trainer that exited without writing a final status.

        If the trainer wrote a reason before, that reason replaces `reason`, unless the trainer was
        stopped.
        """
        verdict: Verdict = "cancelled" if state is JobState.CANCELLED else "failed"
        if state is not JobState.CANCELLED:
            reason = self._status.reason or reason
        step = max(self._newest, 0)
        return self._make_event(
            Status(self._attempt, verdict, self._status.phase, step, self._max_steps, reason)
        )

    def _make_event(self, status: Status, point: Point | None = None) -> JobEvent:
        self._seq += 1
        return JobEvent(
            seq=self._seq,
            time=time.time(),
            state=_job_state(status),
            reason=status.reason,
            phase=status.phase,
            attempt=self._attempt,
            step=point.step if point else max(status.step, self._newest),
            max_steps=status.max_steps or self._max_steps,
            metrics=point.metrics if point else {},
        )


def _job_state(status: Status) -> JobState:
    if status.verdict == "running" and status.phase in ("", "starting", "preflight"):
        return JobState.PREPARING
    return _STATES[status.verdict]


def run_attempt(
    run: RunDirectory, attempt: int, output: Output, inherited: Sequence[int] = ()
) -> tuple[JobView, ExitCode]:
    """Run one attempt to its end and show its progress. Only for the main thread (signal handlers).

    Returns the job's final view, and the trainer's exit code: INTERRUPTED after Ctrl-C, JOB_FAILED
    for a code that is no ExitCode. `inherited`: file descriptors that the trainer inherits.
    """
    config = run.config()
    progress = JobView(run.path.name, attempt=attempt, max_steps=config.max_steps)
    follower = RunFollower(run, attempt, config.max_steps)
    with (
        _run_trainer(run, attempt, config.processes, inherited) as trainer,
        _StopSignals(run, output) as signals,
        display(output, progress) as view,
    ):
        has_ended = False
        while not has_ended:
            # Poll the process before reading its files, to miss nothing written before its end.
            has_ended = trainer.poll() is not None
            for event in follower.poll():
                progress.add(event)
                view.show(event)
            if signals.kill and not has_ended:
                _kill_group(trainer)
            elif not has_ended:
                time.sleep(SECONDS_BETWEEN_POLLS)
        if not follower.over:
            final_event = follower.trainer_died(*_final_reason(trainer.returncode, signals.kill))
            progress.add(final_event)
            view.show(final_event)
    if signals.is_interrupted:
        return progress, ExitCode.INTERRUPTED
    is_exit_code = trainer.returncode in {code.value for code in ExitCode}
    return progress, ExitCode(trainer.returncode) if is_exit_code else ExitCode.JOB_FAILED


class _StopSignals:
    """Signal handlers. The first signal requests a checkpoint and a stop; a later Ctrl-C kills.

    SIGTERM and SIGHUP never kill. Batch systems send SIGTERM more than once, and send SIGKILL when
    the time for a checkpoint is over.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, run: RunDirectory, output: Output) -> None:
        self._run = run
        self._output = output
        self._stop_requested = self.kill = self.is_interrupted = False

    def __enter__(self) -> _StopSignals:
        self._previous_handlers = {
            number: signal.signal(number, self._handle_signal) for number in self._SIGNALS
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = self.is_interrupted or number == signal.SIGINT
        self.kill = self.kill or (self._stop_requested and number == signal.SIGINT)
        if not self._stop_requested:
            self._stop_requested = True
            self._run.write_control(Control(stop="checkpoint"))
            self._output.say("stopping after a checkpoint; press Ctrl-C again to kill the job")


@contextmanager
def _run_trainer(
    run: RunDirectory, attempt: int, processes: int, inherited: Sequence[int]
) -> Iterator[subprocess.Popen[bytes]]:
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    with run.log_file(attempt).open("ab") as log:
        process = subprocess.Popen(
            trainer_command(run.path, attempt=attempt, processes=processes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            pass_fds=inherited,
            # A session of its own, so that the terminal does not send Ctrl-C to the trainer too.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
        # The launcher of several processes may have died before them.
        _kill_group(process)
        delete_abandoned()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _final_reason(returncode: int, killed: bool) -> tuple[str, JobState]:
    if killed:
        return "killed; the job can resume from its last checkpoint", JobState.CANCELLED
    if returncode == ExitCode.WRONG_STATE:
        return "another program is running in the run directory; stop that program", JobState.FAILED
    ending = f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"
    return f"the trainer ended {ending} without a final status; read its log", JobState.FAILED
