"""Directories in memory for the weights that a trainer hands to rollout engines. No torch.

A directory in memory outlives a trainer that is killed, and holds the memory of a whole model.
Each trainer therefore locks its directory. When a trainer has ended, its shim or `distill run`
deletes the directories that no process locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY_DISK = Path("/dev/shm")
_PREFIX = "distill-weights-"
_TRIES = 10


def has_room(needed_bytes: int) -> bool:
    """Return whether `needed_bytes` fit into memory. Half of the free memory stays free."""
    return (
        os.access(MEMORY_DISK, os.W_OK) and shutil.disk_usage(MEMORY_DISK).free > 2 * needed_bytes
    )


def locked_directory() -> Path | None:
    """Return a new directory in memory, locked until this process ends.

    Returns None if other processes deleted each of several as abandoned before it was locked.
    """
    for _ in range(_TRIES):
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY_DISK))
        with suppress(OSError):
            _lock_directory(root)  # a lock and no process id, which may be of another container
            if root.exists():
                return root
    return None


def delete_abandoned() -> None:
    """Delete the directories of this user in memory whose trainers have ended."""
    for directory in MEMORY_DISK.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # the lock is held, or another user owns the directory
            lock = _lock_directory(directory)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock_directory(root: Path) -> int:
    """Lock a directory and return its descriptor. Raises OSError if another process holds it."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
