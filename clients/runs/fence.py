"""The fence of a run directory. It prevents earlier attempts from writing after a later one has
started.

The fence is a file with the number of the newest attempt. The owner of the run writes the number
before it starts the attempt. The attempt's processes receive their number in $DISTILL_FENCE. Before
they write results, they compare it with the number in the file.

On one machine, the lock of the run directory already excludes a second program. The fence also
works between machines, where locks do not work. It also stops a process that was suspended while a
later attempt started.
"""

from __future__ import annotations

import os
from pathlib import Path

from clients.data.outside import open_regular
from protos.errors import WrongState

VARIABLE = "DISTILL_FENCE"


def raise_fence(run: Path, attempt: int) -> str:
    """Forbid all attempts before `attempt` to write to the run directory `run`.

    Returns the value to set as $DISTILL_FENCE for the processes of `attempt`.
    """
    from clients.runs.directory import replace_file  # shims import this module and stay light

    path = run / ".attempt"
    if _read_attempt(path) != attempt:
        replace_file(path, f"{attempt}\n")
    return f"{attempt}:{path}"


def require_unfenced() -> None:
    """Raise WrongState if a later attempt has replaced the attempt of this process.

    Call this before writing or deleting files of a run: a status, a line of metrics, samples, a
    checkpoint, or a file of a capture. Each call reads a small file, so do not call it per row.
    Without $DISTILL_FENCE (a run without a server) nothing is checked.
    """
    attempt, newest = _own_and_newest_attempt()
    if newest > attempt:
        raise WrongState(
            f"attempt {attempt} was replaced by attempt {newest}",
            hint="this process stops writing",
        )


def is_fenced() -> bool:
    """Return True if a later attempt has replaced the attempt of this process."""
    attempt, newest = _own_and_newest_attempt()
    return newest > attempt


def own_attempt() -> int:
    """Return the number of the attempt of this process; 0 without $DISTILL_FENCE."""
    return int(os.environ.get(VARIABLE, "").partition(":")[0] or 0)


def _own_and_newest_attempt() -> tuple[int, int]:
    """Return the numbers of the attempt of this process and of the newest attempt.

    Both numbers are 0 if $DISTILL_FENCE is not set, or if the fence file cannot be read.
    """
    attempt, _, path = os.environ.get(VARIABLE, "").partition(":")
    newest = _read_attempt(Path(path)) if path else None
    return (0, 0) if newest is None else (int(attempt), newest)


def _read_attempt(path: Path) -> int | None:
    """Return the number in a fence file; None if the file is missing or invalid (a broken disk)."""
    try:
        with open_regular(path) as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None
