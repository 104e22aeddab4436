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
    """The shims under `directories` that are alive: they have a shim.json and no exit.json.

    A shim whose node has died never writes exit.json. It counts as gone when its heartbeat file has
    not changed for 15 s by this node's clock.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        cards = [card for directory in directories for card in directory.rglob("shim.json")]
        self._beats = {card.parent: (0, time.monotonic()) for card in cards}

    def are_gone(self) -> bool:
        """Return True if no shim is alive; else sleep 0.5 s and return False."""
        self._beats = {path: self._read_beat(path) for path in self._beats if self._is_alive(path)}
        if self._beats:
            time.sleep(_LOOK_SECONDS)
        return not self._beats

    def _is_alive(self, path: Path) -> bool:
        silent_seconds = time.monotonic() - self._beats[path][1]
        return silent_seconds < _SILENCE_SECONDS and not (path / "exit.json").exists()

    def _read_beat(self, path: Path) -> tuple[int, float]:
        """Return the heartbeat's mtime in ns, and the monotonic time of its last seen change."""
        previous_time, since = self._beats[path]
        modified_time = _modification_time(path / "heartbeat")
        return (
            (previous_time, since)
            if modified_time == previous_time
            else (modified_time, time.monotonic())
        )


def attempts_before(directory: Path) -> list[Path]:
    """Return the log directories of the attempts before the one with log directory `directory`."""
    number = _attempt_number(directory)
    return [path for path in directory.parent.glob("attempt-*") if _attempt_number(path) < number]


def _modification_time(path: Path) -> int:
    try:
        with path.open("rb") as file:  # NFS refreshes a file's attributes when it is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _attempt_number(directory: Path) -> int:
    return int(directory.name.removeprefix("attempt-"))
