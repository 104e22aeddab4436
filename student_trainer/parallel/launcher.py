"""The rank of this process, and how it ends together with its launcher. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def is_main_process() -> bool:
    """Return True in the process of rank 0, or if there is no launcher.

    Reads $RANK, which `accelerate launch` sets, so it works before any collective.
    """
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """Kill this process when `accelerate launch` ends. Without a launcher, do nothing.

    Each rank has a session of its own, so a killed launcher would otherwise leave it running.
    """
    if "RANK" in os.environ:
        end_with_parent()


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends. Linux only.

    `parent`: its process id. If it has ended already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)
