"""The rank of this process, and its termination together with the launcher. Without torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def is_main_process() -> bool:
    """Return True in the process of rank 0, or if there is no launcher.

    Reads $RANK, which `accelerate launch` sets, and therefore works before any collective.
    """
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """Kill this process when `accelerate launch` exits. Without a launcher, do nothing.

    Each rank has its own session, so it would otherwise continue after its launcher is killed.
    """
    if "RANK" in os.environ:
        end_with_parent()


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process (SIGKILL) when its parent exits. Other systems
    than Linux cannot do this.

    `parent`: process id of the parent. If the parent has already exited, this process exits at
    once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)
