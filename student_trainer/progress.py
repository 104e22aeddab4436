"""The trainer's side of status.json and control.json."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from clients.run_directory import RunDirectory, Status, Verdict

_SECONDS_BETWEEN_WRITES = 0.5


class Progress:
    """Tells the owner of the run how it fares, and hears whether it shall stop.

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
            self._run.write_status(status)
