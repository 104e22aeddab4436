"""Writes metrics.jsonl, and reads the file while a job's program may be writing it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clients.data.outside import open_regular
from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Another destination for the metrics, such as TensorBoard."""

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Record the finite metrics of a step. Calls come in ascending order of steps."""

    def close(self) -> None:
        """Write all buffered metrics, and release resources. No method is called afterwards."""


class MetricsLog:
    """Appends one line per step to metrics.jsonl, and passes the values to trackers.

    - `evaluations`: the steps with an evaluation, including those of earlier attempts
    - `last`: the last step; None if the file is empty

    Both are in memory, so that no caller reads the file again. The constructor and `write` raise
    WrongState if a newer attempt has replaced this attempt.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        last_step: int | None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Open the file, and remove the steps after `last_step`, because this attempt repeats them.

        `last_step`: the step from which the attempt resumes; None: the attempt starts from the
        beginning.
        """
        require_unfenced()
        self._attempt = attempt
        self._path = run.metrics
        self.evaluations = list[Point]()
        self._last_line = b""
        replace_file(self._path, self._lines_up_to(last_step))
        self.last = _point_of(self._last_line) if self._last_line else None
        self._file = self._path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the finite values of a step, and return them.

        Log a warning for each other value.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - finite.keys():
            log.warning("step %d: %s is %s and was not written", step, name, values[name])
        require_unfenced()
        record = {"attempt": self._attempt, "step": step, **finite}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.last = Point(step, finite)
        if any(name.startswith(_EVALUATION) for name in finite):
            self.evaluations.append(self.last)
        for tracker in self._trackers:
            tracker.log(step, finite)
        return finite

    def _lines_up_to(self, last_step: int | None) -> Iterator[str]:
        """Yield the lines of the file to keep, and add their evaluations to `evaluations`."""
        if last_step is None:
            return
        for line in _lines_of(self._path):
            # A killed process may have left an incomplete last line. A written line is ASCII.
            step = _step_of(line) if line.endswith(b"\n") and line.isascii() else None
            if step is None:
                log.warning("metrics.jsonl: removed a damaged line")
            elif step <= last_step:
                if _EVALUATION_BYTES in line and (point := _point_of(line)):
                    self.evaluations.append(point)
                self._last_line = line
                yield line.decode("ascii")

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


# The start of the names of held-out metrics, and its form in a line.
_EVALUATION = "eval/"
_EVALUATION_BYTES = b'"eval/'
# A line as `MetricsLog` writes it.
_STEP = re.compile(rb'\{"attempt": \d+, "step": (\d+)[,}]')
_MAX_CURVE_STEPS = 10_000
# Most bytes per read, so that a restarted server reads the history of a long run in pieces.
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Point:
    """The finite metrics of one step."""

    step: int
    metrics: Mapping[str, float]


class MetricsTail:
    """Reads the steps that one attempt appends to metrics.jsonl, each step once.

    When a job resumes, its program replaces the file by a shorter file, so an offset in the file is
    not enough to distinguish new steps from old steps. Steps of other attempts, and steps up to
    `seen_step`, are therefore skipped.
    """

    def __init__(self, path: Path, *, attempt: int, seen_step: int) -> None:
        """Read the file at `path`, which may not exist yet.

        `attempt`: number of the attempt to read. `seen_step`: last step that the caller already
        has.
        """
        self._path = path
        self._attempt = attempt
        self._seen_step = seen_step
        self._inode = 0
        self._offset = 0

    def read(self) -> Sequence[Point]:
        """Return the new steps, from at most 1 MiB of the file.

        The result is empty if there are none yet.
        """
        points = []
        for line in self._new_lines():
            point = _point_of(line, self._attempt)
            if point is not None and point.step > self._seen_step:
                self._seen_step = point.step
                points.append(point)
        return points

    def read_all(self) -> Sequence[Point]:
        """Return all new steps. Call this after the program has exited."""
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


def read_points(path: Path) -> Iterator[Point]:
    """Yield every complete step in the file, of all attempts. Yield nothing if there is no file."""
    return (point for line in _lines_of(path) if (point := _point_of(line)) is not None)


def read_evaluations(path: Path) -> Iterator[Point]:
    """Yield the steps with an evaluation. Other lines are not parsed."""
    lines = (line for line in _lines_of(path) if _EVALUATION_BYTES in line)
    return (point for line in lines if (point := _point_of(line)) is not None)


def read_curves(path: Path, limit: int = _MAX_CURVE_STEPS) -> list[Point]:
    """Return the steps of the file that a plot needs.

    A short run gives all its steps. A long run gives the last step, all steps with an evaluation,
    and at most `limit` of the other steps, at equal distances (a power of two). Only the returned
    lines are parsed, so memory and parsing time do not grow with the length of the run.
    """
    steps, evaluations = dict[int, bytes](), dict[int, bytes]()
    interval, last = 1, dict[int, bytes]()
    for line in _lines_of(path):
        step = _step_of(line)
        if step is None:
            continue
        last = {step: line}
        if _EVALUATION_BYTES in line:
            evaluations[step] = line
        elif step % interval == 0:
            steps[step] = line
        if len(steps) > limit:
            interval *= 2
            steps = {step: line for step, line in steps.items() if step % interval == 0}
    lines = dict(sorted((steps | evaluations | last).items()))
    return [point for line in lines.values() if (point := _point_of(line)) is not None]


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file, each with its line break. Yield nothing if there is no file."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        yield from file


def _step_of(line: bytes) -> int | None:
    """Return the number of the step in a line; None for an invalid line."""
    if (match := _STEP.match(line)) and line.rstrip().endswith(b"}"):
        return int(match[1])
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _point_of(line: bytes, attempt: int | None = None) -> Point | None:
    """Parse a line. Return None if the line is invalid, or if it is of another attempt.

    `attempt`: number of the attempt; None: any attempt.
    """
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
