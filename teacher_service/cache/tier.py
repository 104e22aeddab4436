"""The interface of cache tiers, and their counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clients.store.store import StoredRows


@dataclass
class TierCounts:
    """Counters of one tier since the start of the program.

    Every lookup is a hit or a miss. It is also a miss if the entry is corrupt or the tier cannot be
    reached. `errors` counts failures of the tier itself. `removed` counts evicted sequences.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    errors: int = 0
    removed: int = 0


class Tier(Protocol):
    """A store of codec bytes, one entry per sequence; it may lose any entry at any time."""

    name: str
    counts: TierCounts

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """Return the uncompressed codec bytes of `key`, or None if there is no entry.

        `max_bytes` bounds their number. Raises Corrupt if the entry is not what was stored.
        """
        ...

    def put(self, entry: StoredRows) -> None:
        """Keep `entry` unless its key is stored. Returns at once and never raises."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget the entry of `key`, because it is corrupt."""
        ...

    async def close(self) -> None:
        """Finish pending writes and release resources."""
        ...
