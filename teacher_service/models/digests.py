"""The digests of a model's weight files: computed while the model loads, and kept for later starts.

A file's digest is kept under its path, device, inode, size and times of change, in the user's cache
directory. The time of the last change of the inode cannot be set by a program, so a file that is
replaced or edited is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from clients.runs.directory import replace_file

_THREADS = 4  # sha256 releases the interpreter; a disk is read faster by several
_MOST_KEPT = 4096
# A file that has changed so recently may change again without another time.
_SETTLED_SECONDS = 2.0


class FileDigests:
    """The sha256 of files, computed in threads from the construction on.

    `kept`: a JSON file with the digests of earlier starts; default: in the user's cache directory.
    Without access to it, nothing is kept.
    """

    def __init__(self, files: Sequence[Path], kept: Path | None = None) -> None:
        self._kept = kept or _cache_directory() / "weight-digests.json"
        known = _read(self._kept)
        self._identities = {file: _identity(file) for file in files}
        self._found: dict[Path, str | Future[str]] = {}
        waiting: SimpleQueue[tuple[Path, Future[str]]] = SimpleQueue()
        for file, identity in self._identities.items():
            if identity in known:
                self._found[file] = known[identity]
            else:
                future = self._found[file] = Future()
                waiting.put((file, future))
        for _ in range(min(_THREADS, waiting.qsize())):
            # Daemons: a teacher whose model cannot be loaded ends without waiting for them.
            threading.Thread(target=_compute, args=(waiting,), name="digests", daemon=True).start()

    def by_name(self) -> dict[str, str]:
        """Wait for the digests, and return them by the name of the file.

        Raises OSError if a file cannot be read.
        """
        new: dict[str, str] = {}
        digests: dict[str, str] = {}
        for file, found in self._found.items():
            if isinstance(found, str):
                digests[file.name] = found
            else:
                digests[file.name] = found.result()
                if _is_settled(file) and _identity(file) == self._identities[file]:
                    new[self._identities[file]] = digests[file.name]
        if new:
            _write(self._kept, {**_read(self._kept), **new})
        return digests


def _compute(waiting: SimpleQueue[tuple[Path, Future[str]]]) -> None:
    with suppress(Empty):
        while True:
            file, future = waiting.get_nowait()
            try:
                with file.open("rb") as stream:
                    future.set_result(hashlib.file_digest(stream, "sha256").hexdigest())
            except OSError as error:
                future.set_exception(error)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distill"


def _identity(file: Path) -> str:
    """Return what changes with the content of a file; "" if there is no such file."""
    path = file.resolve()
    try:
        stat = path.stat()
    except OSError:
        return ""
    numbers = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return ":".join([str(path), *map(str, numbers)])


def _is_settled(file: Path) -> bool:
    return time.time() - file.stat().st_ctime > _SETTLED_SECONDS


def _read(kept: Path) -> dict[str, str]:
    try:
        if kept.stat().st_uid != os.getuid():  # somebody else's word is not taken
            return {}
        document = json.loads(kept.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {name: digest for name, digest in document.items() if isinstance(digest, str)}


def _write(kept: Path, digests: Mapping[str, str]) -> None:
    newest = dict([*digests.items()][-_MOST_KEPT:])
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(kept, json.dumps(newest, indent=1) + "\n")
