"""Writes the progress of a capture to metrics.jsonl, and polls control.json for a stop request."""

from __future__ import annotations

import time
from collections.abc import Callable

from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress

PHASE = "capturing"
_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_POLLS = 0.2


class CaptureStopped(Exception):
    """Raised when the job was asked to stop. Rows that are not in a complete file are lost."""


class Recorder:
    """Counts the scored sequences, and writes a line of metrics about once per second.

    The step of the job is the number of scored sequences. `step` is its first value: the number of
    sequences in complete files. `phase` is the text that the progress shows.
    """

    def __init__(
        self,
        progress: Progress,
        metrics: MetricsLog,
        get_stored_bytes: Callable[[], int],
        *,
        step: int,
        phase: str = PHASE,
    ) -> None:
        """`get_stored_bytes` returns the size of the complete files in bytes."""
        self._progress = progress
        self._metrics = metrics
        self._get_stored_bytes = get_stored_bytes
        self._step = step
        self._phase = phase
        self._rows = 0  # since the last line of metrics
        self._last_line_time = self._last_poll = time.monotonic()

    def count_sequence(self, rows: int) -> None:
        """Count one sequence with `rows` rows. Raises CaptureStopped at a stop request."""
        self._step += 1
        self._rows += rows
        now = time.monotonic()
        if now - self._last_poll >= _SECONDS_BETWEEN_POLLS:
            self._last_poll = now
            self._progress.say(self._phase, self._step)
            if self._progress.stop_wanted():
                raise CaptureStopped
        if now - self._last_line_time >= _SECONDS_BETWEEN_LINES:
            self.write_line()

    def write_line(self) -> None:
        """Write a line of metrics for the rows since the last line, if there are new rows."""
        if not self._rows:
            return
        now = time.monotonic()
        values = {
            "tokens": self._rows,
            "tokens_per_sec": self._rows / max(now - self._last_line_time, 1e-9),
            "bytes": self._get_stored_bytes(),
        }
        self._metrics.write(self._step, values)
        self._progress.say(self._phase, self._step)
        self._rows, self._last_line_time = 0, now
