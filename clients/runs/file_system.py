"""Durable directories, file locks, and directories in memory.

Directories in memory are for the weights that a trainer hands to rollout engines. Such a directory
outlives a trainer that is killed, and holds the memory of a whole model. Each trainer therefore
locks its directory. When a trainer has ended, its shim or `distill run` deletes the directories
that no process locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from protos.errors import InvalidInput

# What file systems answer that keep no order of renames, or no locks.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def lock_file(file: IO[str] | int, path: Path, *, wait: bool) -> None:
    """Take the exclusive lock of an open file at `path`; closing the file releases it.

    Raises BlockingIOError if another process holds it and `wait` is false, and InvalidInput if the
    file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
            raise
        raise InvalidInput(
            f"the file system of {path.parent} has no file locks ({os.strerror(error.errno)}), so"
            " two processes could write there at the same time",
            hint="use a local disk, or mount the network file system with locks (flock)",
        ) from error


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
