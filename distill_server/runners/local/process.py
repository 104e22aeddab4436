"""Identifies and signals processes that outlive the server. Linux only.

A pid is reused, so boot id, pid and start time together identify a process. The processes of one
attempt carry a mark in their environment. Children inherit it, even if they change their process
group or session. A process can overwrite its environment (setproctitle does), so the shim also
follows the descendants of its trainer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.data.regular_file import open_regular

MARK = "DISTILL_ATTEMPT_MARK"


@dataclass(frozen=True)
class Identity:
    """Identifies one process uniquely. `start_time` is in clock ticks since the boot."""

    boot_id: str
    pid: int
    start_time: int


def boot_id() -> str:
    """Return the kernel's random id of this boot, which changes with every reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity_of(pid: int) -> Identity | None:
    """Return the identity of the process with this pid; None if there is none or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None else Identity(boot_id(), pid, int(fields[19]))


def consumption(who: Identity) -> tuple[float, int] | None:
    """Return the CPU seconds and the resident bytes of a process; None if it is gone.

    The CPU seconds include those of its ended children.
    """
    fields = _stat(who.pid)
    if fields is None or int(fields[19]) != who.start_time:
        return None
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def send_signal(who: Identity, signum: int) -> bool:
    """Send a signal to exactly this process.

    Returns False if the process is gone, even if another one has its pid now, or if it belongs to
    another user.
    """
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    try:
        # The pidfd stays bound to one process, so this check also holds when the signal is sent.
        if identity_of(who.pid) != who:
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def family(mark: str, known: Iterable[Identity] = ()) -> list[Identity]:
    """Return the live processes of an attempt.

    They are the processes of this user whose environment contains the mark, the processes of
    `known` that are still alive, and the descendants of both. A process that overwrites its
    environment, as setproctitle does, is found as a descendant or in `known`.
    """
    wanted, known = f"{MARK}={mark}".encode(), set(known)
    living, parents = _processes()
    found = {pid for pid, who in living.items() if who in known}
    for pid in living.keys() - found:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # the process is gone, or belongs to another user
        if wanted in environment.split(b"\0"):
            found.add(pid)
    return [living[pid] for pid in sorted(found | _below(found, parents))]


def descendants(pid: int) -> list[Identity]:
    """Return the live processes below the process `pid`, without itself."""
    living, parents = _processes()
    return [living[below] for below in sorted(_below({pid}, parents) - {pid})]


def kill_family(
    mark: str, patience_seconds: float = 10.0, *, known: Iterable[Identity] = (), under: int = 0
) -> bool:
    """Send SIGKILL to all processes of an attempt, repeatedly, until none is left.

    The processes are those of `family(mark, known)` and the descendants of the process `under`.
    Returns False if some are still alive after `patience_seconds`. Processes of another user, which
    this one may not kill, are left alone.
    """
    known, beyond = set(known), set[Identity]()
    deadline = time.monotonic() + patience_seconds
    while members := {*family(mark, known), *(descendants(under) if under else ())} - beyond:
        if time.monotonic() > deadline:
            return False
        for who in members:
            if not send_signal(who, signal.SIGKILL) and identity_of(who.pid) == who:
                beyond.add(who)
        known |= members
        time.sleep(0.01)
    return True


def _processes() -> tuple[dict[int, Identity], dict[int, int]]:
    """Return all live processes by pid, and the parent of each.

    Both are empty if /proc is of another pid namespace, where a pid is another process.
    """
    boot = boot_id()
    living: dict[int, Identity] = {}
    parents: dict[int, int] = {}
    if os.readlink("/proc/self") != str(os.getpid()):
        return living, parents
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            living[int(name)] = Identity(boot, int(name), int(fields[19]))
            parents[int(name)] = int(fields[1])
    return living, parents


def _below(roots: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = set(), list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on.

    None for a zombie, for no process, and for one that this user may not look at (hidepid).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name is any bytes, also spaces and parentheses, so split after its last ")". The
    # next field is the state.
    fields = stat[stat.rindex(b")") + 2 :].decode().split()
    return None if fields[0] in "ZX" else fields


# The shim and the server share the following functions. They do not use clients.runs.directory,
# which imports pydantic: a shim must start in milliseconds and use little memory for days.


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a temporary file, flush it to disk and rename it to `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is no regular file with a JSON object."""
    try:
        with open_regular(path) as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def claim(directory: Path) -> bool:
    """Claim an attempt by creating a file in its directory; True for the first caller only.

    A shim claims its attempt before it starts the trainer. A server that finds no shim claims the
    attempt before it declares it lost. So a shim that starts late never starts a second trainer.
    """
    try:
        os.close(os.open(directory / "claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
