"""The interface of cache tiers, their counters, and the tier in this process's memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from clients.store.store import StoredRows


@dataclass
class TierCounts:
    """Counters of one tier since the start of the program.

    Each lookup adds one to `hits` or to `misses`. If the entry is corrupt, or the tier cannot be
    reached, the lookup is a miss. `errors` is the number of failures of the tier itself. `removed`
    is the number of evicted sequences.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    errors: int = 0
    removed: int = 0


class Tier(Protocol):
    """A store of encoded rows, one entry per sequence; entries can be lost at any time."""

    name: str
    counts: TierCounts

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """Return the uncompressed codec bytes of `key`, or None if there is no entry.

        `max_bytes` is the maximum size of a valid result. Raises Corrupt if the stored entry has
        changed.
        """
        ...

    def put(self, entry: StoredRows) -> None:
        """Store `entry` if the tier does not have its key yet. Returns at once and never raises."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget the entry of `key`, because it is corrupt."""
        ...

    async def close(self) -> None:
        """Finish pending writes and release resources."""
        ...


_ENTRY_BYTES = 256  # Python's overhead per entry


class MemoryTier:
    """A tier in the memory of this process, for at most `max_bytes` bytes of rows and overhead.

    When the tier is full, it evicts the least recently used entries.
    """

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self.counts = TierCounts()

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """Return the codec bytes of `key`, or None; `max_bytes` is ignored."""
        return self.peek(key)

    def peek(self, key: bytes) -> bytes | None:
        """Return the codec bytes of `key`, or None, and mark the entry as used."""
        rows = self._entries.get(key)
        if rows is not None:
            self._entries.move_to_end(key)
        return rows

    def put(self, entry: StoredRows) -> None:
        """Store `entry` and evict old entries if necessary.

        `entry` is not stored if the tier already has its key, or if it is larger than the tier.
        """
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
        """Forget the entry of `key`, if there is one."""
        rows = self._entries.pop(key, None)
        if rows is not None:
            self._size -= len(rows) + _ENTRY_BYTES

    async def close(self) -> None:
        """Do nothing: this tier has no resources to release."""
