"""The differences between operating systems.

The client runs on Linux, macOS and Windows. Servers, teachers, rollout services and trainers need
Linux, because they use process trees, /proc and directories in memory.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from protos.errors import InvalidInput

IS_WINDOWS = sys.platform == "win32"
NON_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)  # a flag of os.open
_NAMES = {"win32": "Windows", "darwin": "macOS"}


def require_linux(program: str) -> None:
    """Raise InvalidInput if the operating system is not Linux.

    `program`: the subject of the message.
    """
    if sys.platform != "linux":
        raise InvalidInput(
            f"{program} needs Linux, and this is {_NAMES.get(sys.platform, sys.platform)}",
            hint="run it on Linux, in WSL or in the container; this machine can be a client of"
            " a job server: distill submit",
        )


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_utf8() -> None:
    """Set the encoding of stdin, stdout and stderr to UTF-8 on Windows.

    Other systems use UTF-8 already.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if IS_WINDOWS and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to disk. Do nothing on Windows, which cannot do this."""
    if IS_WINDOWS:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write `data` to an open file, from the byte `offset` on."""
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        os.write(descriptor, data)
    else:
        os.pwrite(descriptor, data, offset)


def reserve_space(descriptor: int, size: int) -> None:
    """Make an open file at least `size` bytes long. On Linux, also reserve the space on the disk.

    Without the reserved space, a write to the mapped file would end the process when the disk is
    full. Raises OSError if the disk is full.
    """
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    elif os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)


if sys.platform == "win32":
    import errno
    import msvcrt

    def lock(descriptor: int, *, wait: bool) -> None:
        """Take the exclusive lock of an open file; closing the file releases it.

        Raises BlockingIOError if another process holds the lock and `wait` is false, and another
        OSError if the file system has no locks.
        """
        while True:
            os.lseek(descriptor, 0, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EDEADLOCK):
                    raise
                if not wait:
                    raise BlockingIOError(*error.args) from error
else:
    import fcntl

    def lock(descriptor: int, *, wait: bool) -> None:
        """Take the exclusive lock of an open file; closing the file releases it.

        Raises BlockingIOError if another process holds the lock and `wait` is false, and another
        OSError if the file system has no locks.
        """
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
