"""The digests of a model's weight files: computed while the model loads, and cached on disk.

The key of a cached digest is the file's path, device, inode, size and times of change; the cache is
in the user's cache directory. The time of the last change of the inode cannot be set by a program,
so a file that is replaced or edited is read again.
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

_THREADS = 4  # sha256 releases the interpreter lock, and several threads read a disk faster
_MAX_CACHED = 4096
# A file that changed this recently may change again within the same timestamp.
_SETTLED_SECONDS = 2.0


class FileDigests:
    """The sha256 of files, computed in threads from the construction on.

    `cache_path`: a JSON file with the digests of earlier starts; default: in the user's cache
    directory. Without access to it, nothing is cached.
    """

    def __init__(self, files: Sequence[Path], cache_path: Path | None = None) -> None:
        self._cache_path = cache_path or _cache_directory() / "weight-digests.json"
        cached_digests = _read_cache(self._cache_path)
        self._identities = {file: _identity(file) for file in files}
        self._digests: dict[Path, str | Future[str]] = {}
        pending_files: SimpleQueue[tuple[Path, Future[str]]] = SimpleQueue()
        for file, identity in self._identities.items():
            if identity in cached_digests:
                self._digests[file] = cached_digests[identity]
            else:
                future = self._digests[file] = Future()
                pending_files.put((file, future))
        for _ in range(min(_THREADS, pending_files.qsize())):
            # Use daemon threads: a teacher that cannot load its model must not wait for them.
            threading.Thread(
                target=_compute_digests, args=(pending_files,), name="digests", daemon=True
            ).start()

    def by_name(self) -> dict[str, str]:
        """Wait for the digests, and return them by the name of the file.

        Raises OSError if a file cannot be read.
        """
        new_digests: dict[str, str] = {}
        digests: dict[str, str] = {}
        for file, digest in self._digests.items():
            if isinstance(digest, str):
                digests[file.name] = digest
            else:
                digests[file.name] = digest.result()
                if _is_settled(file) and _identity(file) == self._identities[file]:
                    new_digests[self._identities[file]] = digests[file.name]
        if new_digests:
            _write_cache(self._cache_path, {**_read_cache(self._cache_path), **new_digests})
        return digests


def _compute_digests(pending_files: SimpleQueue[tuple[Path, Future[str]]]) -> None:
    with suppress(Empty):
        while True:
            file, future = pending_files.get_nowait()
            try:
                with file.open("rb") as stream:
                    future.set_result(hashlib.file_digest(stream, "sha256").hexdigest())
            except OSError as error:
                future.set_exception(error)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distill"


def _identity(file: Path) -> str:
    """Return a key that changes when the file changes; "" if there is no such file."""
    path = file.resolve()
    try:
        stat = path.stat()
    except OSError:
        return ""
    numbers = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return ":".join([str(path), *map(str, numbers)])


def _is_settled(file: Path) -> bool:
    return time.time() - file.stat().st_ctime > _SETTLED_SECONDS


def _read_cache(cache_path: Path) -> dict[str, str]:
    try:
        if cache_path.stat().st_uid != os.getuid():  # another user's cache is not trusted
            return {}
        document = json.loads(cache_path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {name: digest for name, digest in document.items() if isinstance(digest, str)}


def _write_cache(cache_path: Path, digests: Mapping[str, str]) -> None:
    newest_digests = dict([*digests.items()][-_MAX_CACHED:])
    with suppress(OSError):
        cache_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(cache_path, json.dumps(newest_digests, indent=1) + "\n")
