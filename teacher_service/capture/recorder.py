"""How a capture fares: a line of metrics.jsonl and a look at control.json about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from clients.runs.metrics_writer import MetricsLog
from clients.runs.progress import Progress

PHASE = "capturing"
_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_LOOKS = 0.2


class Stopped(Exception):
    """The owner of the run wishes it to end; what is not in a complete file is lost."""


class Recorder:
    """A step is a sequence; `step` counts those that are scored, from the complete files on."""

    def __init__(
        self, progress: Progress, metrics: MetricsLog, stored: Callable[[], int], *, step: int
    ) -> None:
        """`stored`: the bytes of the complete files."""
        self._progress = progress
        self._metrics = metrics
        self._stored = stored
        self._step = step
        self._rows = 0  # since the last line
        self._told = self._looked = time.monotonic()

    def scored(self, rows: int) -> None:
        """One more sequence with its rows. Raises Stopped."""
        self._step += 1
        self._rows += rows
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._progress.say(PHASE, self._step)
            if self._progress.stop_wanted():
                raise Stopped
        if now - self._told >= _SECONDS_BETWEEN_LINES:
            self.tell()

    def tell(self) -> None:
        """A line about what was scored since the last one."""
        if not self._rows:
            return
        now = time.monotonic()
        values = {
            "tokens": self._rows,
            "tokens_per_sec": self._rows / max(now - self._told, 1e-9),
            "bytes": self._stored(),
        }
        self._metrics.write(self._step, values)
        self._progress.say(PHASE, self._step)
        self._rows, self._told = 0, now
