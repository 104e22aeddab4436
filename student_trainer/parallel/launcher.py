"""What a trainer owes to the process that started it. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def is_main_process() -> bool:
    """`accelerate launch` numbers its processes; alone, one is the main one."""
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """A rank of `accelerate launch` has a session of its own: a killed launcher must end it too."""
    if "RANK" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """However it ends, and at once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
