"""The disk tier of the cache: a store of rows that a background thread writes."""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from clients.store.store import LogitStore, StoredRows, remove_store
from protos.errors import Corrupt, DistillError
from protos.rows.codec import compress_rows, expand_rows
from teacher_service.cache.tier import TierCounts

log = logging.getLogger(__name__)

FLUSH_BYTES = 64 << 20
FLUSH_SECONDS = 60.0
# Each shard is a line of the manifest and a memory map of this process, so their number is bounded.
MAX_SHARDS = 4096
MAX_WAITING_BYTES = 256 << 20


class DiskTier:
    """A tier that collects entries in memory and writes them to the disk as shards.

    An entry has the rows of one sequence. A shard is written when its entries have 64 MiB, or one
    minute after its first entry.

    Each teacher fingerprint has a directory of its own under `root`. Above `max_bytes` the tier
    removes the rows of other teachers first, then its own oldest shards. If the disk fails while a
    shard is written, the entries of this shard are lost; later shards are still written. With
    `zstd`, rows are compressed.
    """

    name = "disk"

    def __init__(self, root: Path, *, fingerprint: str, max_bytes: int, zstd: bool = False) -> None:
        """Open or create the store, and start the writer thread.

        A store with a damaged manifest is removed and created again. Raises WrongState if another
        process writes to the store, InvalidInput without pyarrow, and OSError if the disk fails.
        """
        self.counts = TierCounts()
        self._root = root
        self._max_bytes = max_bytes
        self._zstd = zstd
        path = root / fingerprint[:32]
        self._store = self._open(path, {"fingerprint": fingerprint})
        self.counts.corrupt += len(self._store.unreadable)
        for name in self._store.unreadable:
            log.warning("cache: shard %s of %s is damaged; it is set aside", name, path)
        self._queue: queue.SimpleQueue[StoredRows | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._count_lock = threading.Lock()
        self._is_failing = False
        self._thread = threading.Thread(target=self._write, name="cache-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._store

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """Return the codec bytes of `key`, at most `max_bytes`, or None if there is no entry.

        Raises Corrupt if the entry is damaged.
        """
        # In a thread, because the page may have to be read from the disk.
        return await asyncio.to_thread(self._read, key, max_bytes) if key in self else None

    def drop(self, key: bytes) -> None:
        """Forget the entry of `key`."""
        self._store.drop(key)

    def put(self, entry: StoredRows) -> None:
        """Queue an entry for the writer thread and return at once.

        The entry is dropped if the store already has its key, or if more than 256 MiB wait to be
        written.
        """
        if entry.key in self or self._waiting_bytes + len(entry.rows) > MAX_WAITING_BYTES:
            return
        with self._count_lock:
            self._waiting_bytes += len(entry.rows)
        self._queue.put(entry)

    async def close(self) -> None:
        """Write the queued entries, stop the writer thread and release the lock of the store."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._store.close()

    def _open(self, path: Path, metadata: dict[str, str]) -> LogitStore:
        try:
            return LogitStore(path, write=True, metadata=metadata)
        except Corrupt as error:
            log.warning("cache: %s; the store is removed and created again", error.message)
            self.counts.corrupt += 1
            remove_store(path)
            return LogitStore(path, write=True, metadata=metadata)

    def _read(self, key: bytes, max_bytes: int) -> bytes | None:
        rows = self._store.get(key)
        return None if rows is None else expand_rows(rows, max_bytes)

    def _write(self) -> None:
        has_more = True
        while has_more:
            entries, has_more = self._collect()
            try:
                self._store.append([*entries.values()])
                self._trim()
                self._is_failing = False
            except OSError as error:
                self.counts.errors += 1
                if not self._is_failing:
                    log.error("cache: %s; rows are not stored until the disk works", error)
                self._is_failing = True

    def _trim(self) -> None:
        sizes = self._store.sizes
        total, count = sum(sizes), len(sizes)
        room = self._max_bytes - total
        self.counts.removed += remove_oldest(self._root, keep=self._store.path, room=room)
        count_before = len(self._store)
        for size in sizes:
            if total <= self._max_bytes and count <= MAX_SHARDS:
                break
            self._store.drop_oldest()
            total, count = total - size, count - 1
        self.counts.removed += count_before - len(self._store)

    def _release_waiting_bytes(self, size: int) -> None:
        with self._count_lock:
            self._waiting_bytes -= size

    def _collect(self) -> tuple[dict[bytes, StoredRows], bool]:
        """Return the entries of the next shard by key, and False if the tier was closed."""
        entry = self._queue.get()
        deadline = time.monotonic() + FLUSH_SECONDS
        entries: dict[bytes, StoredRows] = {}
        size = 0
        while entry is not None:
            self._release_waiting_bytes(len(entry.rows))
            if entry.key not in self and entry.key not in entries:
                rows = compress_rows(entry.rows) if self._zstd else entry.rows
                entries[entry.key] = replace(entry, rows=rows)
                size += len(rows)
            if size >= FLUSH_BYTES:
                return entries, True
            try:
                entry = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return entries, True
        return entries, False


log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, order=True)
class _Store:
    last_used: float
    path: Path
    bytes: int


def remove_oldest(root: Path, *, keep: Path, room: int) -> int:
    """Remove stores in `root`, the least recently used first, until the others fit in `room` bytes.

    The store `keep` is neither removed nor counted. A store that another teacher has open is
    skipped: that teacher bounds its own size. Returns the number of sequences that were removed.
    """
    stores = sorted(_list_stores(root, keep))
    total = sum(store.bytes for store in stores)
    removed = 0
    for store in stores:
        if total <= room:
            break
        total -= store.bytes
        try:
            removed += remove_store(store.path)
            log.info("cache: removed %s, %d MiB of another teacher", store.path, store.bytes >> 20)
        except (DistillError, OSError) as error:
            log.info("cache: %s is not removed: %s", store.path, error)
    return removed


def _list_stores(root: Path, keep: Path) -> list[_Store]:
    stores = []
    for lock in root.glob("*/lock"):
        path = lock.parent
        if path == keep or not _NAME.fullmatch(path.name):
            continue
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            stores.append(_Store(lock.stat().st_mtime, path, size))
        except FileNotFoundError:
            continue  # another teacher is removing it
    return stores
