"""Rows that were scored before: memory in front of the disk. Nothing unverified is ever served."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass

from clients.logit_store import StoredRows
from clients.score_query import ScoreQuery
from protos.errors import Corrupt
from protos.rows import RowBlock, decode_rows
from teacher_service.disk_tier import DiskTier

log = logging.getLogger(__name__)

_ENTRY_BYTES = 256  # what Python needs for an entry besides the rows


@dataclass(frozen=True)
class ScoredSequence:
    """All rows of one query: the codec bytes, and the same decoded."""

    encoded: bytes
    block: RowBlock


@dataclass
class CacheCounters:
    """Since the start of the program."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0


class RowCache:
    """LRU in memory, bounded in bytes, over an optional disk tier. A key's first write wins."""

    def __init__(self, *, memory_bytes: int, disk: DiskTier | None) -> None:
        self._memory_bytes = memory_bytes
        self._disk = disk
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self.counters = CacheCounters()

    async def get(self, key: bytes, query: ScoreQuery) -> ScoredSequence | None:
        """The verified rows of `query`, or None; a corrupt entry is dropped, counted and not
        served.
        """
        encoded = self._entries.get(key)
        if encoded is not None:
            self._entries.move_to_end(key)
        elif self._disk is not None and key in self._disk:
            # The page may have to come from the disk first.
            encoded = await asyncio.to_thread(self._disk.get, key)
        found = None if encoded is None else self._verified(key, query, encoded)
        if found is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self._remember(key, found.encoded)
        return found

    def put(self, key: bytes, query: ScoreQuery, scored: ScoredSequence) -> ScoredSequence:
        """Store, and return what holds the key now: another request may have been first."""
        earlier = self._entries.get(key)
        if earlier is not None:
            return self._verified(key, query, earlier) or scored
        self._remember(key, scored.encoded)
        if self._disk is not None and key not in self._disk:
            self._disk.put(StoredRows(key, query.token_ids.tobytes(), query.start, scored.encoded))
        return scored

    def close(self) -> None:
        """Bring what is not yet on disk there. Blocks."""
        if self._disk is not None:
            self._disk.close()

    def _verified(self, key: bytes, query: ScoreQuery, encoded: bytes) -> ScoredSequence | None:
        try:
            block = decode_rows(encoded)
            if (len(block), block.k) != (query.rows, query.k):
                raise Corrupt(f"an entry has {len(block)} rows instead of {query.rows}")
        except Corrupt as error:
            self.counters.corrupt += 1
            log.warning("cache: dropped entry %s: %s", key.hex()[:16], error)
            self._drop(key)
            return None
        return ScoredSequence(encoded, block)

    def _remember(self, key: bytes, encoded: bytes) -> None:
        if key in self._entries or len(encoded) + _ENTRY_BYTES > self._memory_bytes:
            return
        self._entries[key] = encoded
        self._size += len(encoded) + _ENTRY_BYTES
        while self._size > self._memory_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._size -= len(oldest) + _ENTRY_BYTES

    def _drop(self, key: bytes) -> None:
        encoded = self._entries.pop(key, None)
        if encoded is not None:
            self._size -= len(encoded) + _ENTRY_BYTES
        if self._disk is not None:
            self._disk.drop(key)
