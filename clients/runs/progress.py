"""The progress of a job's program: its status, its stop requests, and its verdict."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from clients.config.tables.job import JobConfig
from clients.data.preview import MAX_BYTES, Preview
from clients.runs.directory import RunDirectory, Status, Verdict, replace_file
from clients.runs.fence import require_unfenced
from protos.errors import DistillError, ExitCode, InvalidInput, Unavailable, WrongState

_SECONDS_BETWEEN_WRITES = 0.5
_Job = TypeVar("_Job", bound=JobConfig)


class AttemptDied(Exception):
    """Raised when the attempt lost one of its processes. The status of the attempt stays "running".

    The job may continue in a new attempt.
    """


class Cancelled(Exception):
    """Raised to end an attempt after a stop request, while the program executes no step.

    For example, the program may be waiting for a copy of a checkpoint.
    """


class Progress:
    """Writes status.json and reads control.json for the program of a job.

    Every process of the program has an instance, but only the main process reads and writes the
    files. `agree` combines the requests of all processes into one decision. Otherwise a process
    could wait in a collective for a process that has stopped.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        max_steps: int,
        main: bool,
        terminated: Callable[[], bool],
        agree: Callable[[int], int] = lambda wish: wish,
    ) -> None:
        """Create the progress of this process. Writes no file.

        - `main`: True in the main process
        - `terminated`: returns True after SIGTERM
        - `agree`: a collective; each process passes a number, and all get the largest of the
          numbers
        """
        self._run = run
        self._main = main
        self._terminated = terminated
        self.agree = agree
        self._status = Status(attempt=attempt, verdict="running", max_steps=max_steps)
        self._notes: list[str] = []
        self._written_at = -_SECONDS_BETWEEN_WRITES

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return self._status.attempt

    def expect(self, max_steps: int) -> None:
        """Set the number of steps of a job whose configuration does not state the number.

        The next write of the status contains the number.
        """
        self._status = dataclasses.replace(self._status, max_steps=max_steps)

    def say(self, phase: str, step: int) -> None:
        """Set phase and step.

        A new phase is written at once; new steps are written twice per second at most.
        """
        status = dataclasses.replace(self._status, phase=phase, step=step)
        is_due = time.monotonic() - self._written_at >= _SECONDS_BETWEEN_WRITES
        if status != self._status and (is_due or phase != self._status.phase):
            self._write_status(status)
        self._status = status

    def note(self, text: str) -> None:
        """Log a warning.

        If the attempt succeeds, the warning also becomes the reason in its status.
        """
        if self._main:
            logging.warning("%s", text)
            self._notes.append(text)

    def end(self, verdict: Verdict, reason: str = "", error: DistillError | None = None) -> None:
        """Write the final verdict.

        `error`: the error that caused a failure; its text is the reason. The main process writes
        the verdicts other than "failed". Any process can fail and then writes "failed" itself; only
        the first failure of the attempt is written.
        """
        if verdict == "succeeded":
            reason = reason or "; ".join(self._notes)
        if verdict == "failed":
            written_status = self._run.read_status()
            is_first_failure = written_status is None or (
                written_status.attempt,
                written_status.verdict,
            ) != (self._status.attempt, verdict)
            self._main = is_first_failure
        status = dataclasses.replace(self._status, verdict=verdict, reason=reason)
        if error is not None:
            code, field = error.code.value, error.field
            status = dataclasses.replace(status, reason=str(error), code=code, field=field)
        self._write_status(status)

    def die(self, reason: str) -> None:
        """Write the reason why the attempt ends without a verdict.

        Writes nothing if another process has already written a final verdict, or if the status
        belongs to another attempt.
        """
        written_status = self._run.read_status()
        if written_status is None or (written_status.attempt, written_status.verdict) == (
            self._status.attempt,
            "running",
        ):
            self._main = True  # the main process may be the lost one
            self._write_status(dataclasses.replace(self._status, reason=reason))

    def stop_wanted(self) -> str:
        """Return the stop request on which all processes agree.

        "" means to continue, "checkpoint" to stop after a checkpoint, and "now" to stop
        immediately. This is a collective through `agree`: all processes must call this method, and
        get the same result.
        """
        wish = self._run.read_control().stop if self._main else ""
        if not wish and self._terminated():
            wish = "checkpoint"
        choices = ("", "checkpoint", "now")
        return choices[self.agree(choices.index(wish))]

    def stop_asked(self) -> bool:
        """Return whether this process has received a stop request.

        This is not a collective. Any thread may call this method.
        """
        return self._terminated() or bool(self._run.read_control().stop)

    def _write_status(self, status: Status) -> None:
        self._status = status
        self._written_at = time.monotonic()
        if self._main:
            require_unfenced()
            self._run.write_status(status)


# Errors of a disk that is broken, or of a file server that does not answer.
_DISK_FAULTS = frozenset((errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EROFS))


def run_to_verdict(
    progress: Progress,
    attempt: Callable[[], Verdict],
    lock: AbstractContextManager[None] = nullcontext(),  # noqa: B008 (it has no state)
) -> int:
    """Run an attempt, write its verdict, and return the exit code of the program.

    - A DistillError gives its own exit code and the verdict "failed".
    - An error of a disk that is full or does not respond is treated as Unavailable.
    - Cancelled gives the verdict "cancelled".
    - AttemptDied leaves no verdict, as if this process had been killed.
    - Any other exception is logged and gives JOB_FAILED.

    `lock`: `RunDirectory.held` in the main process. A WrongState error means that another process
    holds the lock, or that the status belongs to a newer attempt. It is printed, and not written to
    the status.
    """
    try:
        with lock:
            return _run_to_verdict(progress, attempt)
    except WrongState as error:  # the status file belongs to the other process
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except DistillError as error:
        return _end_as_failed(progress, error)
    except OSError as error:
        return _end_as_failed(progress, _write_fault(error))


def _run_to_verdict(progress: Progress, attempt: Callable[[], Verdict]) -> int:
    try:
        verdict = attempt()
        progress.end(verdict)
    except DistillError as error:
        return _end_as_failed(progress, error)
    except Cancelled as error:
        logging.info("cancelled: %s", error)
        progress.end("cancelled")
    except AttemptDied as error:
        logging.exception("the attempt died")
        progress.die(str(error))
        return ExitCode.JOB_FAILED
    except Exception as error:
        if isinstance(error, OSError) and is_of_a_disk(error):
            logging.exception("the disk failed")
            return _end_as_failed(progress, _disk_fault(error))
        logging.exception("the program failed")
        progress.end("failed", f"{type(error).__name__}: {error}")
        return ExitCode.JOB_FAILED
    return ExitCode.OK


def _end_as_failed(progress: Progress, error: DistillError) -> int:
    # Where the status cannot be written, the server decides by the exit code.
    with contextlib.suppress(OSError):
        progress.end("failed", error=error)
    with contextlib.suppress(OSError):  # the log may be on the same disk
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def is_of_a_disk(error: OSError) -> bool:
    """Return True if the error is that of a full, broken or missing disk."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or (error.filename is not None and error.errno in _DISK_FAULTS)


def _disk_fault(error: OSError) -> Unavailable:
    place = f": {error.filename}" if error.filename else ""
    return Unavailable(
        f"{(error.strerror or str(error)).lower()}{place}",
        field="disk",
        hint="free or repair the disk; a job of a server then continues",
    )


def _write_fault(error: OSError) -> DistillError:
    if is_of_a_disk(error):
        return _disk_fault(error)
    return InvalidInput(
        f"{(error.strerror or str(error)).lower()}: {error.filename}",
        field="run directory",
        hint="the user that runs the job must be able to write there",
    )


def prepare() -> Callable[[], bool]:
    """Start logging, and handle SIGTERM. Return a function that returns True after SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    terminated = False

    def on_sigterm(*_: object) -> None:
        nonlocal terminated
        terminated = True

    signal.signal(signal.SIGTERM, on_sigterm)
    return lambda: terminated


def print_reply(work: Callable[[], str]) -> int:
    """Print the JSON text that `work` returns, or its DistillError as JSON. Return the exit code.

    A command that must not import the packages of a program starts the program, and reads this
    reply.
    """
    try:
        print(work())
    except DistillError as error:
        fields = {
            "code": error.code.value,
            "message": error.message,
            "field": error.field,
            "hint": error.hint,
        }
        print(json.dumps({"error": fields}))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def write_preview(run: RunDirectory, make_preview: Callable[[], Preview]) -> None:
    """Write the preview of a job into its run directory, unless an earlier attempt has written it.

    `make_preview` may raise a DistillError, for example because the data cannot be read. This
    function then logs a warning, writes no preview, and raises nothing. The program reads the same
    data later, and reports the error then.
    """
    if run.preview.exists():
        return
    try:
        replace_file(run.preview, make_preview().within(MAX_BYTES).to_json())
    except DistillError as error:
        logging.warning("the job has no preview: %s", error)


def run_program(
    kind: type[_Job],
    name: str,
    description: str | None,
    work: Callable[[RunDirectory, _Job, Progress], Verdict],
) -> int:
    """Run one attempt of a job of `kind`, and return the exit code; 2 for a wrong command line.

    - `name`, `description`: of the program, for its --help
    - `work`: runs the attempt and returns its verdict. This process holds the lock of the run
      directory during the call. After SIGTERM, `stop_wanted` of the Progress returns "checkpoint".
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    terminated = prepare()
    run = RunDirectory(options.run)
    job = run.config()
    assert isinstance(job, kind), "trainer_command selects the program"
    progress = Progress(run, attempt=options.attempt, max_steps=0, main=True, terminated=terminated)
    return run_to_verdict(progress, lambda: work(run, job, progress), run.held())
