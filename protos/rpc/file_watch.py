"""Watches files of a running server, and reads them again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from protos.errors import DistillError

_PERIOD_SECONDS = 2.0

# For each file its time, size and inode; None for a file that cannot be looked at.
_Stamp: TypeAlias = list[tuple[int, int, int] | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchedFiles:
    """Files that are read together.

    - `paths`: their paths
    - `read`: reads all of them; raises a DistillError to refuse their content
    """

    paths: Sequence[Path]
    read: Callable[[], None]


@contextmanager
def watch_files(watched_files: Sequence[WatchedFiles]) -> Iterator[Callable[[], None]]:
    """During the block, call `read` of each WatchedFiles on a thread when its files have changed.

    Yields a function that makes the thread read all files now. Refused content is logged once.
    """
    # A daemon thread: a file system that does not answer blocks neither the server nor its end.
    is_requested, is_stopping = threading.Event(), threading.Event()

    def run() -> None:
        # Not the stamps of now: a file may have changed since its first read.
        read_stamps: list[_Stamp | None] = [None] * len(watched_files)
        last_stamps = list(read_stamps)
        while True:
            must_read = is_requested.wait(_PERIOD_SECONDS)
            is_requested.clear()
            if is_stopping.is_set():
                return
            for number, files in enumerate(watched_files):
                stamp = _stamp_of(files.paths)
                # A file that changes between two looks may be half written.
                is_changed = stamp != read_stamps[number] and stamp == last_stamps[number]
                if must_read or is_changed:
                    _read(files, logs_success=must_read or read_stamps[number] is not None)
                    read_stamps[number] = stamp
                last_stamps[number] = stamp

    def request() -> None:
        is_requested.set()

    threading.Thread(target=run, name="file watch", daemon=True).start()
    try:
        yield request
    finally:
        is_stopping.set()
        is_requested.set()


def _read(files: WatchedFiles, *, logs_success: bool) -> None:
    """Read the files. Log a refusal and, if `logs_success`, a success."""
    names = ", ".join(map(str, files.paths))
    try:
        files.read()
    except DistillError as error:
        log.error("%s cannot be used, and its previous content stays valid: %s", names, error)
    except Exception:
        log.exception("cannot read %s again", names)
    else:
        if logs_success:
            log.info("read %s again", names)


def _stamp_of(paths: Sequence[Path]) -> _Stamp:
    stamps: _Stamp = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return stamps
