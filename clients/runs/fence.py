"""The fence between the attempts at a job: one that was given up changes nothing any more.

Whoever starts an attempt first raises the fence of the run directory to its number, and tells the
attempt's processes through $DISTILL_FENCE. They ask before they publish anything. On one machine
the lock of the run directory keeps two trainers apart already; the fence also holds where locks do
not reach, and against a process that slept through its own end.
"""

from __future__ import annotations

import os
from pathlib import Path

from protos.errors import WrongState

VARIABLE = "DISTILL_FENCE"


def raise_fence(run: Path, attempt: int) -> str:
    """No attempt before `attempt` may write to `run` from now on; returns $DISTILL_FENCE for it."""
    from clients.runs.directory import replace_file  # a shim, which only asks, stays light

    path = run / ".attempt"
    if _newest(path) != attempt:
        replace_file(path, f"{attempt}\n")
    return f"{attempt}:{path}"


def require_unfenced() -> None:
    """Asked before anything of a run is published or deleted: a status, a line of metrics, samples,
    a checkpoint, a file of a capture. Once for each, and not for a row: it reads a small file.

    Raises WrongState when this process is of an attempt that has a successor. A run without a
    server has no fence.
    """
    attempt, newest = _attempts()
    if newest > attempt:
        raise WrongState(
            f"attempt {attempt} was given up, and attempt {newest} has begun",
            hint="this process writes nothing more",
        )


def is_fenced() -> bool:
    """Whether this process is of an attempt that has a successor."""
    attempt, newest = _attempts()
    return newest > attempt


def _attempts() -> tuple[int, int]:
    """This process's, and the newest; equal where there is no fence."""
    attempt, _, path = os.environ.get(VARIABLE, "").partition(":")
    newest = _newest(Path(path)) if path else None
    return (0, 0) if newest is None else (int(attempt), newest)


def _newest(path: Path) -> int | None:
    """None where there is none, or nonsense of a broken disk."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
