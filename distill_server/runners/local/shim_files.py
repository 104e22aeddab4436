"""What a shim leaves in its directory: who it is (shim.json), and how its child ended (exit.json).

`heartbeat` is touched every second in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distill_server.runners.local.process import Identity, read_json


@dataclass(frozen=True)
class Card:
    """A shim.json: who watches the attempt, and the mark of its processes."""

    shim: Identity
    mark: str


def card_of(directory: Path) -> Card | None:
    """None while there is none."""
    found = read_json(directory / "shim.json")
    match found:
        case {"boot_id": str(boot), "pid": int(pid), "start_time": int(start), "mark": str(mark)}:
            return Card(Identity(boot, pid, start), mark)
    return None


def exit_code_of(directory: Path) -> int | None:
    """Minus the signal's number when a signal killed the child; None while it is not there."""
    code = (read_json(directory / "exit.json") or {}).get("code")
    return code if isinstance(code, int) else None
