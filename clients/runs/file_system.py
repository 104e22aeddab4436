"""Durable directories and file locks, also on network file systems that lack one of them."""

from __future__ import annotations

import errno
import fcntl
import os
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
