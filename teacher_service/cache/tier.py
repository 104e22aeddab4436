"""What the tiers of the cache have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clients.store.store import StoredRows


@dataclass
class TierCounts:
    """Since the start of the program. Every lookup is a hit or a miss; a corrupt entry, and a tier
    that cannot be reached, are misses too. `errors` are faults of the tier itself; `removed` counts
    sequences that made room for others.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    errors: int = 0
    removed: int = 0


class Tier(Protocol):
    """Holds the codec bytes of whole sequences by key; may forget any of them at any time."""

    name: str
    counts: TierCounts

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """The bytes of a key, uncompressed, of which there are at most `max_bytes`.

        Raises Corrupt for an entry that is not what was stored.
        """
        ...

    def put(self, entry: StoredRows) -> None:
        """Keep an entry unless its key has one. Returns at once; never raises."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget an entry that turned out to be corrupt."""
        ...

    async def close(self) -> None: ...
