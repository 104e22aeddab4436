"""Identifies and signals processes that outlive the server. Linux only.

A pid is reused, so boot id, pid and start time together identify a process. The processes of one
attempt carry a mark in their environment. Child processes inherit the mark, even if they change
their process group or session. A process can overwrite its environment (setproctitle does), so the
shim also follows the descendants of its trainer.
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

from clients.data.outside import open_regular

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
    """Return the identity of the process with this pid; None for a zombie or an unused pid."""
    fields = _read_stat(pid)
    return None if fields is None else Identity(boot_id(), pid, int(fields[19]))


def consumption(process: Identity) -> tuple[float, int] | None:
    """Return the CPU seconds and the resident bytes of a process; None if it is gone.

    The CPU seconds include the CPU seconds of its ended children.
    """
    fields = _read_stat(process.pid)
    if fields is None or int(fields[19]) != process.start_time:
        return None
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def send_signal(process: Identity, signum: int) -> bool:
    """Send a signal to exactly this process.

    Returns False if the process is gone, even if another process has its pid now, or if the process
    belongs to another user.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The pidfd stays bound to one process, so this check also holds when the signal is sent.
        if identity_of(process.pid) != process:
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def family(mark: str, known_processes: Iterable[Identity] = ()) -> list[Identity]:
    """Return the live processes of an attempt.

    They are the processes of this user whose environment contains the mark, the processes of
    `known_processes` that are still alive, and the descendants of both. A process that overwrites
    its environment, as setproctitle does, is found as a descendant or in `known_processes`.
    """
    mark_entry, known_processes = f"{MARK}={mark}".encode(), set(known_processes)
    identity_by_pid, parents = _list_processes()
    pids = {pid for pid, process in identity_by_pid.items() if process in known_processes}
    for pid in identity_by_pid.keys() - pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # the process is gone, or belongs to another user
        if mark_entry in environment.split(b"\0"):
            pids.add(pid)
    return [identity_by_pid[pid] for pid in sorted(pids | _collect_descendants(pids, parents))]


def descendants(pid: int) -> list[Identity]:
    """Return the live processes below the process `pid`, without itself."""
    identity_by_pid, parents = _list_processes()
    return [
        identity_by_pid[descendant]
        for descendant in sorted(_collect_descendants({pid}, parents) - {pid})
    ]


def kill_family(
    mark: str,
    patience_seconds: float = 10.0,
    *,
    known_processes: Iterable[Identity] = (),
    under: int = 0,
) -> bool:
    """Send SIGKILL to all processes of an attempt, repeatedly, until none is alive.

    The processes are those of `family(mark, known_processes)` and the descendants of the process
    `under`. Returns False if a process is still alive after `patience_seconds`. Processes that this
    user may not kill are ignored.
    """
    known_processes, unkillable = set(known_processes), set[Identity]()
    deadline = time.monotonic() + patience_seconds
    while (
        members := {*family(mark, known_processes), *(descendants(under) if under else ())}
        - unkillable
    ):
        if time.monotonic() > deadline:
            return False
        for process in members:
            if not send_signal(process, signal.SIGKILL) and identity_of(process.pid) == process:
                unkillable.add(process)
        known_processes |= members
        time.sleep(0.01)
    return True


def _list_processes() -> tuple[dict[int, Identity], dict[int, int]]:
    """Return all live processes by pid, and the parent of each.

    Both are empty if /proc belongs to another pid namespace, where pids have other meanings.
    """
    boot = boot_id()
    identity_by_pid: dict[int, Identity] = {}
    parents: dict[int, int] = {}
    if os.readlink("/proc/self") != str(os.getpid()):
        return identity_by_pid, parents
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _read_stat(int(name))):
            identity_by_pid[int(name)] = Identity(boot, int(name), int(fields[19]))
            parents[int(name)] = int(fields[1])
    return identity_by_pid, parents


def _collect_descendants(roots: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    pids, pending = set(), list(roots)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in pids:
                pids.add(child)
                pending.append(child)
    return pids


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on.

    Returns None for a zombie, for an unused pid, and for a process that this user may not read
    (hidepid).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name may contain spaces and parentheses, so split after the last ")". The next
    # field is the state.
    fields = stat[stat.rindex(b")") + 2 :].decode().split()
    return None if fields[0] in "ZX" else fields


# The shim and the server share the following functions. The functions do not use
# clients.runs.directory, which imports pydantic: a shim must start in milliseconds and use little
# memory.


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to a temporary file, flush it to disk and rename it to `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is no regular file with a JSON object."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def claim(directory: Path) -> bool:
    """Claim an attempt by creating a file in its directory. True only for the first caller.

    A shim claims its attempt before it starts the trainer. A server that finds no shim claims the
    attempt before it declares the attempt lost. So a shim that starts late starts no trainer.
    """
    try:
        os.close(os.open(directory / "claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
