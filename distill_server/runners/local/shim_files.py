"""Reads the files of shims, and waits for their end, also on other nodes that share the directory.

shim.json, processes.json and exit.json hold the shim's identity and mark, the processes of its
attempt, and the exit code. Until it writes exit.json, a shim touches the file `heartbeat` every
second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distill_server.runners.local.process import Identity, kill_family, read_json


@dataclass(frozen=True)
class Card:
    """The content of a shim.json: the shim's identity and the mark of the attempt's processes."""

    shim: Identity
    mark: str


def card_of(directory: Path) -> Card | None:
    """Read shim.json; None if it is missing or not valid."""
    content = read_json(directory / "shim.json")
    match content:
        case {"boot_id": str(boot), "pid": int(pid), "start_time": int(start), "mark": str(mark)}:
            return Card(Identity(boot, pid, start), mark)
    return None


def exit_code_of(directory: Path) -> int | None:
    """Read the exit code from exit.json; -N for signal N, None if the file is missing."""
    code = (read_json(directory / "exit.json") or {}).get("code")
    return code if isinstance(code, int) else None


def kill_processes(directory: Path, card: Card) -> None:
    """Kill the processes of the attempt in `directory`, after the death of its shim."""
    kill_family(card.mark, known_processes=processes_of(directory))


def processes_of(directory: Path) -> list[Identity]:
    """Read processes.json: the processes of the attempt when its shim last listed them."""
    match read_json(directory / "processes.json"):
        case {"boot_id": str(boot), "processes": list(pairs)}:
            valid_pairs = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            return [Identity(boot, pid, start) for pid, start in valid_pairs]
    return []


# A shim touches its heartbeat every second. On shared storage, the touch is visible a few seconds
# later.
_SILENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class LivingShims:
    """The shims under `directories` that are alive: they have a shim.json and no exit.json.

    If the node of a shim has died, the shim never writes exit.json. Such a shim is treated as gone
    when its heartbeat file has not changed for 15 s of this node's clock.
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
        """Return the mtime of the heartbeat file in ns, and when its last change was seen.

        The second value is in seconds of the monotonic clock.
        """
        previous_time, since = self._beats[path]
        modified_time = _modification_time(path / "heartbeat")
        return (
            (previous_time, since)
            if modified_time == previous_time
            else (modified_time, time.monotonic())
        )


def attempts_before(directory: Path) -> list[Path]:
    """Return the log directories of all attempts before one attempt.

    `directory` is the log directory of this one attempt.
    """
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
