"""Waits until shims and what they watch are gone, on whatever nodes that share the directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

# A shim touches its heartbeat every second, and what it touches is seen a few seconds later.
_SILENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class LivingShims:
    """Those with a shim.json under `places` that have not written how it ended.

    One whose node is gone never will: it is known by a heart that stands still, by this node's
    clock.
    """

    def __init__(self, places: Iterable[Path]) -> None:
        cards = [card for place in places for card in place.rglob("shim.json")]
        self._beats = {card.parent: (0, time.monotonic()) for card in cards}

    def are_gone(self) -> bool:
        """Waits a moment if they are not."""
        self._beats = {path: self._beat(path) for path in self._beats if self._lives(path)}
        if self._beats:
            time.sleep(_LOOK_SECONDS)
        return not self._beats

    def _lives(self, path: Path) -> bool:
        silent = time.monotonic() - self._beats[path][1]
        return silent < _SILENCE_SECONDS and not (path / "exit.json").exists()

    def _beat(self, path: Path) -> tuple[int, float]:
        """When it last changed, by its own clock and since when by ours."""
        before, since = self._beats[path]
        now = _touched(path / "heartbeat")
        return (before, since) if now == before else (now, time.monotonic())


def attempts_before(directory: Path) -> list[Path]:
    """The log directories of the attempts before the one that has `directory`."""
    number = _number(directory)
    return [path for path in directory.parent.glob("attempt-*") if _number(path) < number]


def _touched(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opening asks a file server anew
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _number(directory: Path) -> int:
    return int(directory.name.removeprefix("attempt-"))
