"""Writes metrics.jsonl, and reads the file while a job's program may be writing it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clients.data.outside import open_regular
from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A second destination for metrics, such as TensorBoard."""

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Record the finite metrics of a step. Steps arrive in ascending order."""

    def close(self) -> None:
        """Flush and release resources. No call follows."""


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
        """Open the file. `last_step`: the step from which the attempt resumes, or None.

        Later steps in the file are removed, because the attempt repeats them.
        """
        require_unfenced()
        self._attempt = attempt
        self._path = run.metrics
        lines = _read_lines_up_to(run, last_step)
        replace_file(self._path, "".join(lines))
        self._file = self._path.open("a", encoding="utf-8")
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

        Call this before a checkpoint is completed: after a power cut, a checkpoint must not be
        newer than its metrics. Any thread may call this method.
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
    for line in run.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
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


log = logging.getLogger(__name__)

# Most bytes per read, so that a restarted server reads the history of a long run in pieces.
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Point:
    """The finite metrics of one step."""

    step: int
    metrics: Mapping[str, float]


class MetricsTail:
    """Reads the steps that one attempt appends to metrics.jsonl, each step once.

    A resumed program replaces the file by a shorter file, so an offset alone cannot distinguish new
    steps from old steps. Steps of other attempts, and steps up to `seen_step`, are skipped.
    """

    def __init__(self, path: Path, *, attempt: int, seen_step: int) -> None:
        """Follow the file at `path`, which may not exist yet."""
        self._path = path
        self._attempt = attempt
        self._seen_step = seen_step
        self._inode = 0
        self._offset = 0

    def read(self) -> Sequence[Point]:
        """Return new steps from at most 1 MiB of the file; empty if there are none yet."""
        points = []
        for line in self._new_lines():
            point = _point_of(line, self._attempt)
            if point is not None and point.step > self._seen_step:
                self._seen_step = point.step
                points.append(point)
        return points

    def read_all(self) -> Sequence[Point]:
        """Return all new steps, after the program has exited."""
        points: list[Point] = []
        offset = -1
        while offset != self._offset:
            offset = self._offset
            points += self.read()
        return points

    def _new_lines(self) -> Sequence[bytes]:
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno == errno.EINVAL:  # a pipe in its place: the program will replace it
                return []
            raise
        with file:
            file_status = os.fstat(file.fileno())
            if file_status.st_ino != self._inode or file_status.st_size < self._offset:
                self._inode, self._offset = file_status.st_ino, 0
            file.seek(self._offset)
            content = file.read(_READ_BYTES)
        # The last line may be incomplete.
        complete_lines = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        return complete_lines.splitlines()


def read_points(path: Path) -> list[Point]:
    """Return every complete step in the file, of all attempts; empty if there is no file."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [point for line in lines if (point := _point_of(line)) is not None]


def _point_of(line: bytes, attempt: int | None = None) -> Point | None:
    """Parse a line; return None for a line of another attempt and for an invalid line."""
    try:
        record = json.loads(line)
        if attempt is not None and record["attempt"] != attempt:
            return None
        return Point(int(record["step"]), _finite_numbers(record))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        log.warning("metrics.jsonl: skipped an invalid line: %r", line[:200])
        return None


def _finite_numbers(record: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name not in ("attempt", "step")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }
