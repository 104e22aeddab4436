"""Directories of cached records: their locks, and the deletion of unused directories.

While a process holds the lock of a directory, it sets the modification time of the lock file every
few seconds. Another process that needs the lock can therefore see whether the first process works
or is suspended. It waits for a working process, but not for a suspended process. The modification
time of the lock file is also the time of the last use of the directory.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from clients.runs.file_system import lock_file
from protos.errors import InvalidInput
from protos.operating_system import IS_WINDOWS

LOCK = "lock"
UNUSED_DAYS = 30
_BEAT_SECONDS = 5.0
# A holder whose lock file keeps its time for longer than this is suspended.
_SUSPENDED_SECONDS = 60.0
_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_REPORTS = 10.0

log = logging.getLogger(__name__)


@contextmanager
def locked_entry(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of the cache during the block. Creates a missing directory.

    Raises TimeoutError if the process that holds the lock is suspended, another OSError if the
    directory cannot be written, and InvalidInput if the file system has no locks.
    """
    lock = _wait_for_lock(directory)
    is_over = threading.Event()
    beat = threading.Thread(target=_beat, args=(directory / LOCK, is_over), daemon=True)
    try:
        beat.start()
        yield
    finally:
        is_over.set()
        beat.join()
        lock.close()


def _beat(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(_BEAT_SECONDS):
        with suppress(OSError):
            os.utime(path)


def _wait_for_lock(directory: Path) -> IO[str]:
    """Wait for the lock of a directory, and return the locked file.

    Closing the file releases the lock.
    """
    path = directory / LOCK
    beat, beat_at = 0, time.monotonic()
    reported_at = beat_at
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock = path.open("a", encoding="utf-8")
        except FileNotFoundError:  # the directory was deleted again
            continue
        try:
            lock_file(lock, path, wait=False)
            if _is_at(lock, path):
                os.utime(path)
                return lock
            lock.close()  # the directory was deleted before the lock was taken
            continue
        except BlockingIOError:
            newest_beat = os.fstat(lock.fileno()).st_mtime_ns
            lock.close()
        except BaseException:
            lock.close()
            raise
        now = time.monotonic()
        if newest_beat != beat:
            beat, beat_at = newest_beat, now
        elif now - beat_at > _SUSPENDED_SECONDS:
            raise TimeoutError(
                errno.ETIMEDOUT,
                "the process that reads or checks the records has been suspended for"
                f" {now - beat_at:.0f} s (it holds {path})",
            )
        if now - reported_at > _SECONDS_BETWEEN_REPORTS:
            reported_at = now
            log.info("waiting for another process that reads or checks the same data (%s)", path)
        time.sleep(_POLL_SECONDS)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def delete_entry(directory: Path) -> bool:
    """Delete a directory of the cache. Return False if another process holds its lock.

    A process that has a file of the directory open can still read the file.
    """
    try:
        with (directory / LOCK).open("a", encoding="utf-8") as lock:
            with suppress(InvalidInput):  # without locks, no process uses the directory
                lock_file(lock, directory / LOCK, wait=False)
            if IS_WINDOWS:  # which renames no directory with an open file
                return _delete_files(directory)
            # Rename the directory first: another process may create a new directory at the old
            # path.
            deleted = directory.with_name(f".deleted-{os.getpid()}-{directory.name[-64:]}")
            directory.rename(deleted)
            shutil.rmtree(deleted, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("cannot delete %s: %s", directory, error)
    return True


def _delete_files(directory: Path) -> bool:
    """Delete all files of a directory but its lock file. Return False if a process reads a file.

    Only Windows refuses to delete a file that a process reads.
    """
    try:
        for path in directory.iterdir():
            if path.name != LOCK:
                path.unlink()
    except PermissionError:
        return False
    return True


def delete_unused(root: Path) -> None:
    """Delete the cached records of data sets that no process has used for UNUSED_DAYS days."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in root.iterdir():
        with suppress(OSError):
            lock = path / LOCK
            if (lock if lock.exists() else path).stat().st_mtime >= oldest:
                continue
            if not path.is_dir():
                path.unlink()
            elif delete_entry(path):
                log.info("deleted %s: not used for %d days", path, UNUSED_DAYS)


def delete_all(root: Path) -> int:
    """Delete all cached records of data sets, except those that a process has locked.

    Returns the number of the remaining directories, each with the records of one data set.
    """
    kept_count = 0
    for path in list(root.iterdir()) if root.is_dir() else []:
        if path.is_dir():
            kept_count += not delete_entry(path)
        else:
            with suppress(OSError):
                path.unlink()
    return kept_count
