"""Follows metrics.jsonl while a trainer writes it."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Of one look: a server that comes back to a long run reads its history in pieces.
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Point:
    """The metrics of one step."""

    step: int
    metrics: Mapping[str, float]


class MetricsTail:
    """Reads what one attempt adds to metrics.jsonl, each step once.

    A resumed trainer replaces the file by a shorter one, so the place in the file is not enough:
    steps of other attempts, and steps up to `seen_step`, are passed over.
    """

    def __init__(self, path: Path, *, attempt: int, seen_step: int) -> None:
        self._path = path
        self._attempt = attempt
        self._seen_step = seen_step
        self._inode = 0
        self._offset = 0

    def read(self) -> Sequence[Point]:
        """The new steps; empty when there are none yet."""
        points = []
        for line in self._new_lines():
            point = _point_of(line, self._attempt)
            if point is not None and point.step > self._seen_step:
                self._seen_step = point.step
                points.append(point)
        return points

    def read_all(self) -> Sequence[Point]:
        """Everything new, however much; for a trainer that is over."""
        points: list[Point] = []
        offset = -1
        while offset != self._offset:
            offset = self._offset
            points += self.read()
        return points

    def _new_lines(self) -> Sequence[bytes]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset = found.st_ino, 0
            file.seek(self._offset)
            data = file.read(_READ_BYTES)
        # The last line may be half written.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


def read_points(path: Path) -> list[Point]:
    """Every whole step in the file, of whatever attempt; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [point for line in lines if (point := _point_of(line)) is not None]


def _point_of(line: bytes, attempt: int | None = None) -> Point | None:
    """None for a line of another attempt, and for nonsense."""
    try:
        found = json.loads(line)
        if attempt is not None and found["attempt"] != attempt:
            return None
        return Point(int(found["step"]), _numbers(found))
    except (ValueError, KeyError, TypeError, OverflowError):
        log.warning("metrics.jsonl: not a step: %r", line[:200])
        return None


def _numbers(found: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        name: float(value)
        for name, value in found.items()
        if name not in ("attempt", "step")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }
