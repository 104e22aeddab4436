"""Between a server and a trainer: it outlives the server and tells how the trainer ended.

    python -m distill_server.runners.local.shim LOG_FILE GRACE_SECONDS [--rank DIRECTORY] -- argv...

Beside the log it writes shim.json (who runs), touches `heartbeat` every second, and writes
exit.json (how it ended). SIGTERM: the trainer's group gets SIGTERM, and SIGKILL after the grace.
SIGQUIT, or that another attempt has begun: SIGKILL.

With --rank it is one of several shims of an attempt: its files go to DIRECTORY, and it outlives
nobody: whoever has the other end of its stdin is the one who wants it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path

from clients.runs.fence import is_fenced
from distill_server.runners.local.process import (
    MARK,
    boot_id,
    claim,
    identity_of,
    kill_family,
    write_json,
)

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGQUIT}
_HEARTBEAT_SECONDS = 1.0
# What a shell says of a command that it cannot run.
_CANNOT_RUN = 127


def main() -> None:
    log_file, grace, *rest = sys.argv[1:]
    options, argv = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    log = Path(log_file)
    directory = Path(options[1]) if options else log.parent
    if options and os.fork():
        os._exit(0)  # no child of a worker of Ray, which kills its children when it ends
    # Blocked signals wait for sigtimedwait: no handlers, no races between a check and a wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_WATCHED, signal.SIGHUP, signal.SIGINT})
    if claim(directory):
        _run(directory, log, float(grace), argv, owned=bool(options))


def _run(directory: Path, log: Path, grace_seconds: float, argv: list[str], *, owned: bool) -> None:
    mark = secrets.token_hex(16)
    try:
        child = _spawn(log, mark, argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error}", file=sys.stderr, flush=True)
        _write_exit(directory, _CANNOT_RUN)
        return
    try:
        _introduce(directory, mark, child)
        code = _follow(child, mark, directory / "heartbeat", grace_seconds, owned=owned)
    finally:
        # Ranks and workers that were left behind would keep memory, ports and the run directory.
        kill_family(mark)
    _write_exit(directory, code)


def _write_exit(directory: Path, code: int) -> None:
    """Keep trying on a full disk: the job's verdict depends on this file."""
    while directory.is_dir():
        try:
            write_json(directory / "exit.json", {"code": code, "ended_at": time.time()})
            return
        except OSError:
            time.sleep(_HEARTBEAT_SECONDS)


def _spawn(log: Path, mark: str, argv: list[str]) -> int:
    """Start the trainer in a process group of its own, with no signal blocked."""
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
        # 0: it is gone already.
        "child_start_time": trainer.start_time if trainer else 0,
        "mark": mark,
    }
    write_json(directory / "shim.json", card)


def _follow(child: int, mark: str, heartbeat: Path, grace_seconds: float, *, owned: bool) -> int:
    """Wait for the trainer's end: its exit code, or minus the signal that killed it."""
    kill_at, unwanted = float("inf"), False
    while True:
        with contextlib.suppress(OSError):
            heartbeat.touch()
        pause = min(_HEARTBEAT_SECONDS, max(0.0, kill_at - time.monotonic()))
        event = signal.sigtimedwait(_WATCHED, pause)
        # Looked at but not waited for, its pid, and its group's, are still its own.
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        told = event.si_signo if event is not None else 0
        # Once only: to some programs a second one means to drop everything.
        if told == signal.SIGTERM and not ended and kill_at == float("inf"):
            _signal_group(child, signal.SIGTERM)
            kill_at = time.monotonic() + grace_seconds
        # At the second look: a trainer that sees the fence itself says so.
        still_unwanted, unwanted = unwanted, is_fenced() or (owned and _hung_up())
        killed = told == signal.SIGQUIT or time.monotonic() >= kill_at or still_unwanted
        if ended or killed:
            _signal_group(child, signal.SIGKILL)
            kill_family(mark)
        if ended:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _hung_up() -> bool:
    """Nobody has the other end of stdin any more; nobody ever writes to it."""
    return bool(select.select([0], [], [], 0)[0])


def _signal_group(leader: int, signum: int) -> None:
    # A trainer may have moved to another group; its family is found by the mark.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signum)


if __name__ == "__main__":
    main()
