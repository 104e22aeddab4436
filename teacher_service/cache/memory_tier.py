"""The rows in this process: least recently used go first."""

from __future__ import annotations

from collections import OrderedDict

from clients.store.store import StoredRows
from teacher_service.cache.tier import TierCounts

_ENTRY_BYTES = 256  # what Python needs for an entry besides the rows


class MemoryTier:
    """At most `max_bytes`."""

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self.counts = TierCounts()

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        return self.peek(key)

    def peek(self, key: bytes) -> bytes | None:
        rows = self._entries.get(key)
        if rows is not None:
            self._entries.move_to_end(key)
        return rows

    def put(self, entry: StoredRows) -> None:
        size = len(entry.rows) + _ENTRY_BYTES
        if entry.key in self._entries or size > self._max_bytes:
            return
        self._entries[entry.key] = entry.rows
        self._size += size
        while self._size > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._size -= len(oldest) + _ENTRY_BYTES
            self.counts.removed += 1

    def drop(self, key: bytes) -> None:
        rows = self._entries.pop(key, None)
        if rows is not None:
            self._size -= len(rows) + _ENTRY_BYTES

    async def close(self) -> None:
        """Nothing to let go of."""
