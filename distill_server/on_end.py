"""Runs a command of the operator at the end of each job, for example to send a message."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

from clients.jobs.job import TERMINAL, Job, facts_of
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

_LIMIT_SECONDS = 30.0
_MAX_WAITING = 1000


class EndCommand:
    """The command of `--on-end`, which gets the record of a job as JSON on its standard input.

    The command runs in a thread, for one job at a time, for at most `seconds` seconds. Its output
    goes to the server's log. The command runs without a shell, and its arguments contain no text of
    a client. If the server is killed, the command is not run later for jobs that have ended.
    """

    def __init__(self, command: str, seconds: float = _LIMIT_SECONDS) -> None:
        """Raises InvalidInput if the program of the command is not found."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise _make_unusable(command, str(error).lower()) from error
        if not self._words or shutil.which(self._words[0]) is None:
            raise _make_unusable(command, "there is no such program")
        self._seconds = seconds
        self._ended_jobs: queue.Queue[Job] = queue.Queue(_MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run_commands, name="on-end", daemon=True).start()
        atexit.register(self._close)

    def on_job_change(self, job: Job) -> None:
        """Run the command for a job that has just changed, if it has ended. Returns at once."""
        if job.state not in TERMINAL:
            return
        try:
            self._ended_jobs.put_nowait(job)
        except queue.Full:
            log.warning("--on-end: not run for job %s, %d others wait", job.id, _MAX_WAITING)

    def _close(self) -> None:
        """Kill the running command, and log the jobs for which no command was run.

        Called at the end of the server process.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                log.warning("--on-end: not run for job %s", self._ended_jobs.get_nowait().id)
        process = self._process
        if process is not None and process.poll() is None:
            log.warning("--on-end: the command is killed, because the server ends")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _run_commands(self) -> None:
        while True:
            job = self._ended_jobs.get()
            try:
                self._run_command(job)
            except Exception as error:  # noqa: BLE001 (a command must not end the thread)
                log.warning("--on-end: job %s: the command cannot run: %s", job.id, error)

    def _run_command(self, job: Job) -> None:
        record = facts_of(replace(job, config_json=""))
        del record["dependencies"]
        process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
        )
        self._process = process
        try:
            process.communicate(json.dumps(record).encode() + b"\n", self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.warning("--on-end: job %s: killed after %g s", job.id, self._seconds)
            return
        finally:
            self._process = None
        if process.returncode:
            log.warning("--on-end: job %s: exit code %d", job.id, process.returncode)


def _make_unusable(command: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"cannot run {command!r}: {reason}",
        field="--on-end",
        hint="give a program and its arguments, such as '/usr/local/bin/tell-people'",
    )
