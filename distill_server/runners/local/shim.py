"""A small process between server and trainer, which outlives the server and records the exit code.

    python -m distill_server.runners.local.shim LOG_FILE GRACE_SECONDS [--rank DIRECTORY] -- argv...

Beside the log, the shim writes shim.json (its own and the trainer's process), every second touches
`heartbeat` and, if they have changed, writes the processes of the attempt to processes.json, and at
the end writes exit.json (the exit code). On SIGTERM it sends SIGTERM to the
trainer's process group, and SIGKILL after the grace period. On SIGQUIT, or if a newer attempt has
started, it sends SIGKILL.

With --rank, it is one of several shims of an attempt: its files go to DIRECTORY, and it kills its
process when the other end of its stdin is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clients.runs.fence import is_fenced
from clients.runs.memory_disk import delete_abandoned
from distill_server.runners.local.process import (
    MARK,
    Identity,
    boot_id,
    claim,
    descendants,
    identity_of,
    kill_family,
    write_json,
)

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGQUIT}
_HEARTBEAT_SECONDS = 1.0
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
# The exit code of a shell for a command that it cannot run.
_CANNOT_RUN = 127


def main() -> None:
    """Parse the command line, claim the attempt, run the trainer and wait for its end.

    Starts nothing if the attempt is already claimed.
    """
    log_file, grace, *rest = sys.argv[1:]
    options, argv = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    log = Path(log_file)
    directory = Path(options[1]) if options else log.parent
    if options and os.fork():
        # Detach from the Ray worker, which kills its children when it ends.
        os._exit(0)
    supervise(directory, log, lambda: float(grace), argv, owned=bool(options))


def supervise(
    directory: Path,
    log: Path,
    grace_seconds: Callable[[], float],
    argv: list[str],
    *,
    owned: bool = False,
) -> int | None:
    """Run `argv` to its end as the shim in this process, and return its exit code.

    -N means that signal N killed it; None: the attempt of `directory` is claimed, so nothing was
    started. `grace_seconds` is asked when SIGTERM comes. `owned`: also kill `argv` when the other
    end of stdin is closed.
    """
    # Blocked signals stay pending until sigtimedwait. Handlers would race with the waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_WATCHED, signal.SIGHUP, signal.SIGINT})
    if not claim(directory):
        return None
    mark = secrets.token_hex(16)
    # Orphans of the trainer become children of this process, so that none is out of its sight.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = _spawn(log, mark, argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error}", file=sys.stderr, flush=True)
        _write_exit(directory, _CANNOT_RUN)
        return _CANNOT_RUN
    try:
        _introduce(directory, mark, child)
        code = _follow(child, mark, directory, grace_seconds, owned=owned)
    finally:
        # Remaining ranks and workers would keep memory, ports and the lock of the run directory.
        with contextlib.suppress(OSError):  # whatever happens, the exit code is written
            kill_family(mark, under=os.getpid())
        delete_abandoned()
    _write_exit(directory, code)
    return code


def _write_exit(directory: Path, code: int) -> None:
    """Write exit.json; retry while the disk is full, because the job's verdict depends on it."""
    while directory.is_dir():
        try:
            write_json(directory / "exit.json", {"code": code, "ended_at": time.time()})
            return
        except OSError:
            time.sleep(_HEARTBEAT_SECONDS)


def _spawn(log: Path, mark: str, argv: list[str]) -> int:
    """Start the trainer in its own process group with no signal blocked, and return its pid."""
    output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    environment = {**os.environ, MARK: mark}
    return os.posix_spawn(
        argv[0], argv, environment, file_actions=files, setpgroup=0, setsigmask=[]
    )


def _introduce(directory: Path, mark: str, child: int) -> None:
    me, trainer = identity_of(os.getpid()), identity_of(child)
    assert me is not None
    card = {
        "boot_id": boot_id(),
        "pid": me.pid,
        "start_time": me.start_time,
        "child_pid": child,
        # 0: the trainer has already ended.
        "child_start_time": trainer.start_time if trainer else 0,
        "mark": mark,
    }
    write_json(directory / "shim.json", card)


def _follow(
    child: int, mark: str, directory: Path, grace_seconds: Callable[[], float], *, owned: bool
) -> int:
    """Wait for the trainer's end and return its exit code; -N means that signal N killed it.

    `owned`: also kill the trainer when the other end of stdin is closed.
    """
    kill_at, unwanted, asked = float("inf"), False, False
    written: list[Identity] = []
    list_at = 0.0
    while True:
        with contextlib.suppress(OSError):
            (directory / "heartbeat").touch()
            if (began := time.monotonic()) >= list_at:
                written = _write_processes(directory, written)
                # A machine may have thousands of processes: at most 2% of the time.
                list_at = began + max(_HEARTBEAT_SECONDS, 50 * (time.monotonic() - began))
        pause = min(_HEARTBEAT_SECONDS, max(0.0, kill_at - time.monotonic()))
        event = signal.sigtimedwait(_WATCHED, pause)
        _reap_orphans(child)
        # WNOWAIT keeps the ended trainer a zombie, so its pid and process group are not reused.
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        told = event.si_signo if event is not None else 0
        # Once only: some programs exit at once on a second SIGTERM.
        if told == signal.SIGTERM and not ended and not asked:
            asked = True
            _signal_group(child, signal.SIGTERM)
            kill_at = time.monotonic() + grace_seconds()
        # Kill one round later: a trainer that finds the fence itself then logs the reason.
        still_unwanted, unwanted = unwanted, is_fenced() or (owned and _hung_up())
        killed = told == signal.SIGQUIT or time.monotonic() >= kill_at or still_unwanted
        if ended or killed:
            _signal_group(child, signal.SIGKILL)
            kill_family(mark, under=os.getpid())
        if ended:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write_processes(directory: Path, written: list[Identity]) -> list[Identity]:
    """Write processes.json if the attempt's processes are not `written`; return what it has now.

    If the shim is killed, the server kills these processes.
    """
    found = descendants(os.getpid())
    if found != written:
        pairs = [[who.pid, who.start_time] for who in found]
        write_json(directory / "processes.json", {"boot_id": boot_id(), "processes": pairs})
    return found


def _reap_orphans(trainer: int) -> None:
    """Wait for the ended children of this process, up to the trainer if it has ended."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == trainer:
            return
        os.waitpid(ended.si_pid, 0)


def _hung_up() -> bool:
    """Return True if the other end of stdin is closed; no data is ever written to it."""
    return bool(select.select([0], [], [], 0)[0])


def _signal_group(leader: int, signum: int) -> None:
    # The group may be gone: a trainer can change it. kill_family finds the processes by their mark.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)


if __name__ == "__main__":
    main()
