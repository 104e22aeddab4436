"""A process between server and trainer that outlives the server and records the exit code.

    python -m distill_server.runners.local.shim LOG_FILE GRACE_SECONDS [--rank DIRECTORY]
        [--lease FILE RUNS SECONDS] -- argv...

The shim writes these files beside the log: shim.json (the processes of shim and trainer),
`heartbeat` (touched every second), processes.json (the processes of the attempt, after each change)
and exit.json (the exit code, at the end). On SIGTERM, the shim sends SIGTERM to the trainer's
process group, and SIGKILL after the grace period. On SIGQUIT, or after the start of a newer
attempt, the shim sends SIGKILL.

With --rank, the shim is one of several shims of an attempt: it writes its files to DIRECTORY, and
kills its process when the other end of its stdin is closed. With --lease, the shim ends its process
as on SIGTERM when the lease is over (`lease.py`).
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
from clients.runs.file_system import delete_abandoned
from distill_server.runners.local.lease import Lease
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
    log_file, grace, *arguments = sys.argv[1:]
    options, argv = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    log = Path(log_file)
    lease = None
    if options[:1] == ["--lease"]:
        lease = Lease(Path(options[1]), Path(options[2]), float(options[3]))
        options = options[4:]
    directory = Path(options[1]) if options else log.parent
    if options and os.fork():
        # Detach from the Ray worker, which kills its children when it ends.
        os._exit(0)
    supervise(directory, log, lambda: float(grace), argv, is_owned=bool(options), lease=lease)


def supervise(
    directory: Path,
    log: Path,
    grace_seconds: Callable[[], float],
    argv: list[str],
    *,
    is_owned: bool = False,
    lease: Lease | None = None,
) -> int | None:
    """Run `argv` to its end as the shim in this process, and return its exit code.

    -N means that signal N killed the process. None means that another process has claimed the
    attempt of `directory`, so nothing was started. `grace_seconds` is called on SIGTERM. With
    `is_owned`, `argv` is also killed when the other end of stdin is closed. At the end of the
    lease, `argv` gets SIGTERM, and SIGKILL after the grace period.
    """
    # Blocked signals stay pending until sigtimedwait. Handlers would race with the waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_WATCHED, signal.SIGHUP, signal.SIGINT})
    if not claim(directory):
        return None
    mark = secrets.token_hex(16)
    # Orphans of the trainer become children of this process, so `descendants` finds them.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = _start_trainer(log, mark, argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error}", file=sys.stderr, flush=True)
        _write_exit(directory, _CANNOT_RUN)
        return _CANNOT_RUN
    try:
        _write_card(directory, mark, child)
        code = _follow_trainer(
            child, mark, directory, grace_seconds, is_owned=is_owned, lease=lease
        )
    finally:
        # Ranks and workers that still run would keep memory, ports and the run directory's lock.
        with contextlib.suppress(OSError):  # write the exit code even if the kill fails
            kill_family(mark, under=os.getpid())
        delete_abandoned()
    _write_exit(directory, code)
    return code


def _write_exit(directory: Path, code: int) -> None:
    """Write exit.json, from which the job's verdict is made. Retries while the disk is full."""
    while directory.is_dir():
        try:
            write_json(directory / "exit.json", {"code": code, "ended_at": time.time()})
            return
        except OSError:
            time.sleep(_HEARTBEAT_SECONDS)


def _start_trainer(log: Path, mark: str, argv: list[str]) -> int:
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


def _write_card(directory: Path, mark: str, child: int) -> None:
    shim, trainer = identity_of(os.getpid()), identity_of(child)
    assert shim is not None
    card = {
        "boot_id": boot_id(),
        "pid": shim.pid,
        "start_time": shim.start_time,
        "child_pid": child,
        # 0: the trainer has already ended.
        "child_start_time": trainer.start_time if trainer else 0,
        "mark": mark,
    }
    write_json(directory / "shim.json", card)


def _follow_trainer(
    child: int,
    mark: str,
    directory: Path,
    grace_seconds: Callable[[], float],
    *,
    is_owned: bool,
    lease: Lease | None,
) -> int:
    """Wait for the trainer's end and return its exit code; -N means that signal N killed it.

    With `is_owned`, also kill the trainer when the other end of stdin is closed; with `lease`, end
    the trainer when the lease is over.
    """
    kill_at, is_unwanted, is_terminated = float("inf"), False, False
    listed_processes: list[Identity] = []
    next_list_at = 0.0
    while True:
        with contextlib.suppress(OSError):
            (directory / "heartbeat").touch()
            if (list_start := time.monotonic()) >= next_list_at:
                listed_processes = _write_processes(directory, listed_processes)
                # A machine may have thousands of processes: list them for at most 2% of the time.
                next_list_at = list_start + max(
                    _HEARTBEAT_SECONDS, 50 * (time.monotonic() - list_start)
                )
        pause = min(_HEARTBEAT_SECONDS, max(0.0, kill_at - time.monotonic()))
        event = signal.sigtimedwait(_WATCHED, pause)
        _reap_orphans(child)
        # WNOWAIT keeps the ended trainer a zombie, so its pid and process group are not reused.
        exit_state = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        signum = event.si_signo if event is not None else 0
        if lease is not None and not is_terminated and not signum:
            with contextlib.suppress(OSError):
                signum = signal.SIGTERM if lease.is_over() else 0
        # Send one SIGTERM only: some programs exit at once on a second one.
        if signum == signal.SIGTERM and not exit_state and not is_terminated:
            is_terminated = True
            _signal_group(child, signal.SIGTERM)
            kill_at = time.monotonic() + grace_seconds()
        # Kill in the next round, so that a trainer that sees the fence itself can log the reason.
        was_unwanted, is_unwanted = is_unwanted, is_fenced() or (is_owned and _is_hung_up())
        must_kill = signum == signal.SIGQUIT or time.monotonic() >= kill_at or was_unwanted
        if exit_state or must_kill:
            _signal_group(child, signal.SIGKILL)
            kill_family(mark, under=os.getpid())
        if exit_state:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write_processes(directory: Path, previous: list[Identity]) -> list[Identity]:
    """Write processes.json if the attempt's processes are not `previous`; return the processes.

    If the shim is killed, the server kills these processes.
    """
    processes = descendants(os.getpid())
    if processes != previous:
        pairs = [[process.pid, process.start_time] for process in processes]
        write_json(directory / "processes.json", {"boot_id": boot_id(), "processes": pairs})
    return processes


def _reap_orphans(trainer: int) -> None:
    """Collect the exit states of ended child processes, up to the trainer's if it has ended."""
    while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if child.si_pid == trainer:
            return
        os.waitpid(child.si_pid, 0)


def _is_hung_up() -> bool:
    """Return True if the other end of stdin is closed; no data is ever written to it."""
    return bool(select.select([0], [], [], 0)[0])


def _signal_group(leader: int, signum: int) -> None:
    # If the trainer has left its group, the group does not exist. `kill_family` finds the trainer.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)


if __name__ == "__main__":
    main()
