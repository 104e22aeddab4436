"""Runs one attempt of a job in the foreground: its process, its events, and Ctrl-C."""

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
from clients.jobs.job import JobState
from clients.jobs.view import JobView
from clients.local.follower import SECONDS_BETWEEN_POLLS, RunFollower
from clients.runs.directory import Control, RunDirectory
from clients.runs.file_system import delete_abandoned
from clients.runs.launch import trainer_command
from protos.errors import ExitCode

# SIGTERM requests a last checkpoint from the trainer; a job server waits for the same time.
SECONDS_TO_STOP = 60.0


def run_attempt(
    run: RunDirectory, attempt: int, output: Output, inherited: Sequence[int] = ()
) -> tuple[JobView, ExitCode]:
    """Run one attempt to its end and show its progress. Only for the main thread (signal handlers).

    `inherited`: file descriptors that the trainer process inherits.

    Returns the final state of the job and the exit code of the command. This is the trainer's exit
    code, or INTERRUPTED after Ctrl-C, or JOB_FAILED if the trainer's code is not an ExitCode.
    """
    config = run.config()
    progress = JobView(run.path.name, attempt=attempt, max_steps=config.max_steps)
    follower = RunFollower(run, attempt, config.max_steps)
    with (
        # The signals first: one between the start of the trainer and them would leave it behind.
        _StopSignals(run, output) as signals,
        _run_trainer(run, attempt, config.processes, inherited) as trainer,
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
    """The signal handlers of a foreground run.

    The first signal asks the trainer to write a checkpoint and stop. A later Ctrl-C kills the
    trainer. SIGTERM and SIGHUP never kill it: batch systems send SIGTERM more than once, and send
    SIGKILL when the time for a checkpoint is over.
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
