"""The fence between attempts: an attempt that was superseded cannot write to the run directory.

The owner raises the fence of the run directory to the number of an attempt before it starts that
attempt, and passes the number to the attempt's processes in $DISTILL_FENCE. The processes compare
the two numbers before they publish anything. On one machine the lock of the run directory already
excludes a second program; the fence also works across machines, where locks do not, and against a
process that was suspended while its successor started.
"""

from __future__ import annotations

import os
from pathlib import Path

from clients.data.regular_file import open_regular
from protos.errors import WrongState

VARIABLE = "DISTILL_FENCE"


def raise_fence(run: Path, attempt: int) -> str:
    """Forbid all attempts before `attempt` to write to the run directory `run`.

    Returns the value of $DISTILL_FENCE for the processes of `attempt`.
    """
    from clients.runs.directory import replace_file  # shims import this module and stay light

    path = run / ".attempt"
    if _read_attempt(path) != attempt:
        replace_file(path, f"{attempt}\n")
    return f"{attempt}:{path}"


def require_unfenced() -> None:
    """Raise WrongState if this process belongs to an attempt that has a successor.

    Call this before publishing or deleting anything of a run: a status, a line of metrics, samples,
    a checkpoint, a file of a capture. Each call reads a small file, so do not call it per row.
    Without $DISTILL_FENCE (a run without a server) nothing is checked.
    """
    attempt, newest = _own_and_newest_attempt()
    if newest > attempt:
        raise WrongState(
            f"attempt {attempt} was replaced by attempt {newest}",
            hint="this process writes nothing more",
        )


def is_fenced() -> bool:
    """Return True if this process belongs to an attempt that has a successor."""
    attempt, newest = _own_and_newest_attempt()
    return newest > attempt


def own_attempt() -> int:
    """Return the attempt of this process; 0 without $DISTILL_FENCE."""
    return int(os.environ.get(VARIABLE, "").partition(":")[0] or 0)


def _own_and_newest_attempt() -> tuple[int, int]:
    """Return the attempt of this process and the newest attempt; equal without a fence."""
    attempt, _, path = os.environ.get(VARIABLE, "").partition(":")
    newest = _read_attempt(Path(path)) if path else None
    return (0, 0) if newest is None else (int(attempt), newest)


def _read_attempt(path: Path) -> int | None:
    """Return the attempt in the file; None if the file is missing or invalid (a broken disk)."""
    try:
        with open_regular(path) as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None
