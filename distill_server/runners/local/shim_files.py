"""Reads the files of a shim: shim.json, processes.json and exit.json.

They hold the shim's identity and mark, the processes of its attempt, and the exit code. Until it
writes exit.json, a shim touches the file `heartbeat` every second.
"""

from __future__ import annotations

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
