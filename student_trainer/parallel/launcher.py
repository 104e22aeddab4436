"""The rank of this process, and its end when the launcher ends. Does not import torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def is_main_process() -> bool:
    """Return True if this process has rank 0, or if there is no launcher.

    The function reads $RANK, which `accelerate launch` sets. It therefore works before torch is
    loaded and before any collective.
    """
    return os.environ.get("RANK", "0") == "0"


def end_with_launcher() -> None:
    """Arrange that the kernel kills this process when `accelerate launch` exits.

    Each rank has its own session, and would otherwise continue after the launcher is killed. Does
    nothing if there is no launcher.
    """
    if "RANK" in os.environ:
        end_with_parent()


def end_with_parent(parent: int | None = None) -> None:
    """Arrange that the kernel kills this process (SIGKILL) when its parent exits.

    `parent`: the process id of the parent; if this parent has already exited, this process is
    killed at once. Only Linux can do this; on other systems, the function does nothing.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)
