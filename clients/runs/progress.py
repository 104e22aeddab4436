"""A job's program tells its run directory how it fares, and hears whether it shall stop."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable

from clients.runs.fence import require_unfenced
from clients.runs.directory import RunDirectory, Status, Verdict
from protos.errors import DistillError, ExitCode

_SECONDS_BETWEEN_WRITES = 0.5


class Progress:
    """The program's side of status.json and control.json.

    Only the main process writes. `agree` makes one decision of all processes' wishes, so that none
    waits for another that has left.
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
        """`terminated`: whether SIGTERM came; `agree`: the largest of all processes' numbers."""
        self._run = run
        self._main = main
        self._terminated = terminated
        self.agree = agree
        self._status = Status(attempt=attempt, verdict="running", max_steps=max_steps)
        self._written = -_SECONDS_BETWEEN_WRITES

    def expect(self, max_steps: int) -> None:
        """How many steps there will be, where the job does not say it; told with the next word."""
        self._status = dataclasses.replace(self._status, max_steps=max_steps)

    def say(self, phase: str, step: int) -> None:
        """A change of phase is written at once, steps of one phase twice a second."""
        new = dataclasses.replace(self._status, phase=phase, step=step)
        due = time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES
        if new != self._status and (due or phase != self._status.phase):
            self._write(new)
        self._status = new

    def end(self, verdict: Verdict, reason: str = "", error: str = "") -> None:
        """The last word. A failure is told by the process that met it, the first one counts."""
        if verdict == "failed":
            told = self._run.read_status()
            first = told is None or (told.attempt, told.verdict) != (self._status.attempt, verdict)
            self._main = first
        self._write(dataclasses.replace(self._status, verdict=verdict, reason=reason, error=error))

    def stop_wanted(self) -> str:
        """ "" to go on, "checkpoint" or "now"."""
        wish = self._run.read_control().stop if self._main else ""
        if not wish and self._terminated():
            wish = "checkpoint"
        choices = ("", "checkpoint", "now")
        return choices[self.agree(choices.index(wish))]

    def _write(self, status: Status) -> None:
        self._status = status
        self._written = time.monotonic()
        if self._main:
            require_unfenced()
            self._run.write_status(status)


def run_to_verdict(progress: Progress, attempt: Callable[[], Verdict]) -> int:
    """Whatever happens to an attempt ends in a verdict and an exit code."""
    try:
        verdict = attempt()
    except DistillError as error:
        progress.end("failed", str(error), type(error).__name__)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        logging.exception("the program failed")
        progress.end("failed", f"{type(error).__name__}: {error}")
        return ExitCode.JOB_FAILED
    progress.end(verdict)
    return ExitCode.OK
