"""Waits for the end of shims and their processes, also on other nodes that share the directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

# A shim touches its heartbeat every second. On shared storage, the touch is visible a few seconds
# later.
_SILENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class LivingShims:
    """The shims under `places` that are alive: they have a shim.json and no exit.json.

    A shim whose node has died never writes exit.json. It counts as gone when its heartbeat file has
    not changed for 15 s by this node's clock.
    """

    def __init__(self, places: Iterable[Path]) -> None:
        cards = [card for place in places for card in place.rglob("shim.json")]
        self._beats = {card.parent: (0, time.monotonic()) for card in cards}

    def are_gone(self) -> bool:
        """Return True if no shim is alive; else sleep 0.5 s and return False."""
        self._beats = {path: self._beat(path) for path in self._beats if self._lives(path)}
        if self._beats:
            time.sleep(_LOOK_SECONDS)
        return not self._beats

    def _lives(self, path: Path) -> bool:
        silent = time.monotonic() - self._beats[path][1]
        return silent < _SILENCE_SECONDS and not (path / "exit.json").exists()

    def _beat(self, path: Path) -> tuple[int, float]:
        """Return the heartbeat's modification time, and our monotonic time of its last change."""
        before, since = self._beats[path]
        now = _touched(path / "heartbeat")
        return (before, since) if now == before else (now, time.monotonic())


def attempts_before(directory: Path) -> list[Path]:
    """Return the log directories of the attempts before the attempt with log `directory`."""
    number = _number(directory)
    return [path for path in directory.parent.glob("attempt-*") if _number(path) < number]


def _touched(path: Path) -> int:
    try:
        with path.open("rb") as file:  # NFS refreshes a file's attributes when it is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _number(directory: Path) -> int:
    return int(directory.name.removeprefix("attempt-"))
