"""What a trainer owes to the process that started it. Imports no torch."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from clients.run_directory import RunDirectory
from protos.errors import WrongState

_PR_SET_PDEATHSIG = 1


def is_main_process() -> bool:
    """`accelerate launch` numbers its processes; alone, one is the main one."""
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """A rank of `accelerate launch` has a session of its own: a killed launcher must end it too."""
    if "RANK" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def only_trainer_of(run: RunDirectory) -> Iterator[None]:
    """Hold the run directory: two trainers in one would spoil each other's files."""
    if not is_main_process():
        yield
        return
    with (run.path / ".trainer.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WrongState(
                f"another trainer is at work in {run.path}", hint="wait for it, or stop it"
            ) from error
        yield
