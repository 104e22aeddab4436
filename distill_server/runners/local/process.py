"""Processes that outlive whoever started them: who is who, and signals that never hit a stranger.

A pid is reused, so a process is known by boot id, pid and start time; the processes of one attempt
are known by a mark in their environment, which they inherit however they fork or change their
group. Linux only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "DISTILL_ATTEMPT_MARK"


@dataclass(frozen=True)
class Identity:
    """One process for good. `start_time` is in clock ticks since the boot."""

    boot_id: str
    pid: int
    start_time: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity_of(pid: int) -> Identity | None:
    """Who runs under `pid` now; None when nobody does, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold spaces and brackets; the fields after it start with the state.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Identity(boot_id(), pid, int(fields[19]))


def send_signal(who: Identity, signum: int) -> bool:
    """Signal exactly this process; False when it is gone, whoever has its pid now."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle keeps meaning the process that was checked after it was opened.
        if identity_of(who.pid) != who:
            return False
        signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def family(mark: str) -> list[Identity]:
    """The live processes whose environment holds the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        if wanted in environment.split(b"\0") and (who := identity_of(int(name))):
            found.append(who)
    return found


def kill_family(mark: str, patience_seconds: float = 10.0) -> bool:
    """SIGKILL every process with the mark, and those they start meanwhile; False if some remain."""
    deadline = time.monotonic() + patience_seconds
    while members := family(mark):
        if time.monotonic() > deadline:
            return False
        for who in members:
            send_signal(who, signal.SIGKILL)
        time.sleep(0.01)
    return True


# The shim shares these with the server. They are not clients.runs.directory's because that imports
# pydantic, and a shim should start in milliseconds and stay small for days.


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` as a whole and durably."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is none, or nonsense of a broken disk."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def claim(directory: Path) -> bool:
    """Decide, once and for all, who disposes of an attempt: True for the first caller only.

    A shim claims its attempt before it starts the trainer; a server that finds no shim claims it
    before it declares the attempt lost. So a shim that comes late never starts a second trainer.
    """
    try:
        os.close(os.open(directory / "claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
