"""Writes metrics.jsonl. Only the main process of a job's program uses this module."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A second destination of metrics, such as TensorBoard."""

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Record the finite metrics of one step; steps come in ascending order."""

    def close(self) -> None:
        """Flush and release resources; no call follows."""


class MetricsLog:
    """Appends one line per step to metrics.jsonl, and passes the values to trackers.

    The constructor and `write` raise WrongState if a newer attempt has replaced this one.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        last_step: int | None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Open the file. `last_step` is the step that the attempt resumes from; None: no resume.

        Later steps in the file are removed, because the attempt repeats them.
        """
        require_unfenced()
        self._attempt = attempt
        self._path = run.metrics
        lines = _read_lines_up_to(run, last_step)
        replace_file(self._path, "".join(lines))
        self._file = self._path.open("a")
        self._trackers = trackers

    def write(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write and return the finite values of a step; log a warning for the other values."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - finite.keys():
            log.warning("step %d: %s is %s and was not written", step, name, values[name])
        require_unfenced()
        record = {"attempt": self._attempt, "step": step, **finite}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.log(step, finite)
        return finite

    def sync(self) -> None:
        """Flush metrics.jsonl to disk.

        Call this before a checkpoint is published: after a power cut, a checkpoint must not be
        newer than its metrics. Another thread may call it.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and all trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _read_lines_up_to(run: RunDirectory, last_step: int | None) -> list[str]:
    if last_step is None or not run.metrics.exists():
        return []
    lines = []
    for line in run.metrics.read_text().splitlines(keepends=True):
        # A killed process may have left an incomplete last line.
        step = _step_of(line) if line.endswith("\n") else None
        if step is None:
            log.warning("metrics.jsonl: removed a damaged line")
        elif step <= last_step:
            lines.append(line)
    return lines


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
