"""Waits until nobody runs an earlier attempt at a job any more, on whatever node."""

from __future__ import annotations

import os
import time
from pathlib import Path

# A shim touches its heartbeat every second, and what it touches is seen a few seconds later.
_SILENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class Predecessors:
    """The shims of the attempts before the one whose logs are in `directory`.

    They end by themselves when they see the fence, and write exit.json; one whose node is gone is
    known by a heart that stands still, by this node's clock.
    """

    def __init__(self, directory: Path) -> None:
        attempt = _number(directory)
        earlier = [path for path in directory.parent.glob("attempt-*") if _number(path) < attempt]
        cards = [card for path in earlier for card in path.rglob("shim.json")]
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


def _touched(path: Path) -> int:
    try:
        with path.open("rb") as file:  # opening asks a file server anew
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _number(directory: Path) -> int:
    return int(directory.name.removeprefix("attempt-"))
