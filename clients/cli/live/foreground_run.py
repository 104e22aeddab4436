"""One attempt of a job in the foreground: the trainer's process, Ctrl-C, and the final event."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from clients.cli.live.display import display
from clients.cli.live.run_follower import RunFollower
from clients.cli.output import Output
from clients.config.kinds import processes_of
from clients.jobs.job import JobState
from clients.jobs.view import JobView
from clients.runs.directory import Control, RunDirectory
from clients.runs.launch import trainer_command
from clients.runs.memory_disk import delete_abandoned
from protos.errors import ExitCode

SECONDS_BETWEEN_POLLS = 0.2
# SIGTERM asks the trainer for a last checkpoint; a job server waits as long for it.
SECONDS_TO_STOP = 60.0
_ERROR = "error: "


def run_attempt(
    run: RunDirectory, attempt: int, output: Output, inherited: Sequence[int] = ()
) -> tuple[JobView, ExitCode]:
    """Run one attempt to its end and show its progress.

    Returns the job's final view, and the trainer's exit code: INTERRUPTED if the user killed it,
    JOB_FAILED if it is not one of ExitCode. `inherited`: file descriptors for the trainer. Use it
    in the main thread, for its signal handlers.
    """
    config = run.config()
    progress = JobView(run.path.name, attempt=attempt, max_steps=config.max_steps)
    follower = RunFollower(run, attempt, config.max_steps)
    with (
        _trainer(run, attempt, processes_of(config), inherited) as trainer,
        _Wishes(run, output) as wishes,
        display(output, progress) as shown,
    ):
        over = False
        while not over:
            # Poll the process before reading its files, to miss nothing written before its end.
            over = trainer.poll() is not None
            for event in follower.poll():
                progress.add(event)
                shown.show(event)
            if wishes.kill and not over:
                _kill(trainer)
            elif not over:
                time.sleep(SECONDS_BETWEEN_POLLS)
        if not follower.over:
            last = follower.died(*_ending(run.log_file(attempt), trainer.returncode, wishes.kill))
            progress.add(last)
            shown.show(last)
    if wishes.kill:
        return progress, ExitCode.INTERRUPTED
    known = trainer.returncode in {code.value for code in ExitCode}
    return progress, ExitCode(trainer.returncode) if known else ExitCode.JOB_FAILED


class _Wishes:
    """The user's signals: the first asks for a checkpoint and a stop, a later Ctrl-C kills.

    SIGTERM and SIGHUP ask only: batch systems send SIGTERM more than once, and end the time to save
    by SIGKILL.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, run: RunDirectory, output: Output) -> None:
        self._run = run
        self._output = output
        self._asked = self.kill = False

    def __enter__(self) -> _Wishes:
        self._before = {number: signal.signal(number, self._wish) for number in self._SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wish(self, number: int, frame: FrameType | None) -> None:
        self.kill = self.kill or (self._asked and number == signal.SIGINT)
        if not self._asked:
            self._asked = True
            self._run.write_control(Control(stop="checkpoint"))
            self._output.say("stopping after a checkpoint; press Ctrl-C again to kill the job")


@contextmanager
def _trainer(
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
        _kill(process)
        delete_abandoned()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(log: Path, returncode: int, killed: bool) -> tuple[str, JobState]:
    if killed:
        return "killed; it can resume from its last checkpoint", JobState.CANCELLED
    errors = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(_ERROR)
    ]
    if errors and returncode > 0:
        return errors[-1].removeprefix(_ERROR), JobState.FAILED
    how = f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"
    return f"the trainer ended {how} and printed no error; read its log", JobState.FAILED
