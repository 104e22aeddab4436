"""The rows on disk behind the memory of the cache: written by a thread of its own, never in the
way.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path

from clients.logit_store import LogitStore, StoredRows

log = logging.getLogger(__name__)

FLUSH_BYTES = 64 << 20
FLUSH_SECONDS = 60.0
# Each is a line of the manifest, and a map of this process: few small ones must not become many.
MAX_SHARDS = 4096
MAX_WAITING_BYTES = 256 << 20


class DiskTier:
    """Collects entries and appends them as shards of 64 MiB or a minute, whichever comes first.

    Above `max_bytes` the oldest shards are removed.
    A disk that fails is named once in the log; from then on the tier only forgets what it is given.
    """

    def __init__(self, path: Path, *, fingerprint: str, max_bytes: int) -> None:
        """Raises WrongState when another teacher writes there, OSError of the disk."""
        self._max_bytes = max_bytes
        self._store = LogitStore(path, write=True, metadata={"fingerprint": fingerprint})
        for name in self._store.unreadable:
            log.warning("cache: shard %s of %s is damaged; its rows are scored again", name, path)
        self._queue: queue.SimpleQueue[StoredRows | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="cache-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._store

    def get(self, key: bytes) -> bytes | None:
        return self._store.get(key)

    def drop(self, key: bytes) -> None:
        self._store.drop(key)

    def put(self, entry: StoredRows) -> None:
        """Hand over an entry; one is dropped when the disk is too far behind."""
        if self._failed or self._waiting_bytes + len(entry.rows) > MAX_WAITING_BYTES:
            return
        with self._counting:
            self._waiting_bytes += len(entry.rows)
        self._queue.put(entry)

    def close(self) -> None:
        """Write what waits, and let go of the directory."""
        self._queue.put(None)
        self._thread.join()
        self._store.close()

    def _write(self) -> None:
        more = True
        while more and not self._failed:
            entries, more = self._collect()
            try:
                self._store.append(entries)
                self._trim()
            except OSError as error:
                log.error("cache: %s; rows are kept in memory only from here on", error)
                self._failed = True
            self._written(sum(len(entry.rows) for entry in entries))

    def _trim(self) -> None:
        sizes = self._store.sizes
        total, count = sum(sizes), len(sizes)
        for size in sizes:
            if total <= self._max_bytes and count <= MAX_SHARDS:
                return
            self._store.drop_oldest()
            total, count = total - size, count - 1

    def _written(self, size: int) -> None:
        with self._counting:
            self._waiting_bytes -= size

    def _collect(self) -> tuple[list[StoredRows], bool]:
        """The entries of the next shard, and whether more may come."""
        entry = self._queue.get()
        deadline = time.monotonic() + FLUSH_SECONDS
        entries: dict[bytes, StoredRows] = {}
        size = 0
        while entry is not None:
            if entry.key in self._store or entry.key in entries:
                self._written(len(entry.rows))
            else:
                entries[entry.key] = entry
                size += len(entry.rows)
            if size >= FLUSH_BYTES:
                return [*entries.values()], True
            try:
                entry = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return [*entries.values()], True
        return [*entries.values()], False
