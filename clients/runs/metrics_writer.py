"""The one writer of metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from clients.runs.fence import require_unfenced
from clients.runs.directory import RunDirectory, replace_file

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where numbers go besides: TensorBoard, say."""

    def log(self, step: int, values: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Appends to metrics.jsonl, and to trackers; one line a step, never twice.

    Raises WrongState when the attempt was given up.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        last_step: int | None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Steps after `last_step`, from where it goes on, are dropped: they come again."""
        require_unfenced()
        self._attempt = attempt
        self._path = run.metrics
        kept = _lines_to(run, last_step)
        replace_file(self._path, "".join(kept))
        self._file = self._path.open("a")
        self._trackers = trackers

    def write(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the finite values, warn of the others; returns what was written."""
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
        """Before a checkpoint: one that survives a power cut must not outlive its metrics."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _lines_to(run: RunDirectory, last_step: int | None) -> list[str]:
    if last_step is None or not run.metrics.exists():
        return []
    kept = []
    for line in run.metrics.read_text().splitlines(keepends=True):
        # A killed process may have left the last line unfinished.
        step = _step_of(line) if line.endswith("\n") else None
        if step is None:
            log.warning("a line of metrics.jsonl is damaged and was dropped")
        elif step <= last_step:
            kept.append(line)
    return kept


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
