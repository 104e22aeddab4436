"""Private and durable directories, file locks, and directories in memory.

A trainer passes weights to rollout engines in directories in memory. Such a directory remains after
the trainer is killed, and occupies the memory of a whole model. Each trainer therefore locks its
directory. After a trainer exits, its shim or `distill run` deletes unlocked directories.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from protos.errors import InvalidInput
from protos.operating_system import lock, sync_directory

# Errors of file systems that cannot sync a directory or have no locks.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def create_private(directory: Path) -> None:
    """Create a directory that only its owner can enter (mode 700), and its missing parents.

    An existing directory keeps its mode, because users may share it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def fsync_directory(path: Path) -> None:
    """Sync new and renamed entries of a directory to disk.

    Do nothing if the file system does not support this.
    """
    try:
        sync_directory(path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def lock_file(file: IO[str] | int, path: Path, *, wait: bool) -> None:
    """Take the exclusive lock of an open file. Closing the file releases the lock.

    - `path`: path of the file, for errors
    - `wait`: True waits while another process holds the lock

    Raises BlockingIOError if another process holds the lock and `wait` is False, and InvalidInput
    if the file system does not support locks.
    """
    try:
        lock(file if isinstance(file, int) else file.fileno(), wait=wait)
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
    """Return whether `needed_bytes` fit into half of the free memory (of /dev/shm)."""
    return (
        os.access(MEMORY_DISK, os.W_OK) and shutil.disk_usage(MEMORY_DISK).free > 2 * needed_bytes
    )


def locked_directory() -> Path | None:
    """Create a directory in memory, and return its path. Its lock is held until this process ends.

    Another process may delete the new directory before it is locked. The function then tries again,
    and returns None after several such attempts.
    """
    for _ in range(_TRIES):
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY_DISK))
        with suppress(OSError):
            _lock_directory(root)  # a lock and no process id, which may be of another container
            if root.exists():
                return root
    return None


def delete_abandoned() -> None:
    """Delete this user's directories in memory (/dev/shm) that no process has locked."""
    for directory in MEMORY_DISK.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # the lock is held, or another user owns the directory
            descriptor = _lock_directory(directory)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(descriptor)


def _lock_directory(root: Path) -> int:
    """Lock a directory and return its descriptor. Raises OSError if another process holds it."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        lock(descriptor, wait=False)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
