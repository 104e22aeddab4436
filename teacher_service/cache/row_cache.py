"""The row cache: a lookup reads memory, then Redis, then the disk. Rows are verified before use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from clients.store.store import StoredRows
from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock, decode_rows, max_encoded_bytes
from teacher_service.cache.tier import MemoryTier, Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedRows:
    """All rows of one query: `encoded` is their codec bytes, `block` the same rows decoded."""

    encoded: bytes
    block: RowBlock


class RowCache:
    """A cache of scored sequences in several tiers: memory, then Redis and disk if given.

    The first write of a key wins. The cache is an async context manager; leaving it finishes
    pending writes and closes the tiers. Use it from one event loop.
    """

    def __init__(
        self, *, memory_bytes: int, redis: Tier | None = None, disk: Tier | None = None
    ) -> None:
        self._memory = MemoryTier(memory_bytes)
        lower_tiers = (tier for tier in (redis, disk) if tier is not None)
        self._tiers: tuple[Tier, ...] = (self._memory, *lower_tiers)

    async def __aenter__(self) -> RowCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        for tier in self._tiers:
            await tier.close()

    def counters(self) -> Mapping[str, int]:
        """Return the event counts since the start of the program.

        `hits` and `misses` count for the whole cache. Each tier has its own counts (TierCounts),
        such as `memory_hits`, `redis_errors` and `disk_corrupt`.
        """
        counts = {tier.name: asdict(tier.counts) for tier in self._tiers}
        totals = {
            "hits": sum(tier_counts["hits"] for tier_counts in counts.values()),
            "misses": counts[self._tiers[-1].name]["misses"],
        }
        return totals | {
            f"{name}_{event}": count
            for name, tier_counts in counts.items()
            for event, count in tier_counts.items()
        }

    def hits_and_misses(self) -> dict[str, tuple[int, int]]:
        """Return (hits, misses) of each tier by name, since the start of the program."""
        return {tier.name: (tier.counts.hits, tier.counts.misses) for tier in self._tiers}

    async def get(self, key: bytes, query: ScoreQuery) -> EncodedRows | None:
        """Return the verified rows of `query`, or None if no tier has them.

        A corrupt entry is dropped, counted and treated as a miss. A hit is copied into the faster
        tiers.
        """
        for depth, tier in enumerate(self._tiers):
            cached_rows = await self._look_up(tier, key, query)
            if cached_rows is not None:
                for faster in self._tiers[:depth]:
                    faster.put(_make_entry(key, query, cached_rows))
                return cached_rows
        return None

    def put(self, key: bytes, query: ScoreQuery, scored: EncodedRows) -> EncodedRows:
        """Store `scored` in every tier, and return the rows that are stored under `key`.

        If memory already holds rows under `key`, from another request, it returns those rows and
        does not store `scored`.
        """
        earlier = self._memory.peek(key)
        if earlier is not None:
            return EncodedRows(earlier, decode_rows(earlier, _estimate_max_bytes(query)))
        for tier in self._tiers:
            tier.put(_make_entry(key, query, scored))
        return scored

    async def _look_up(self, tier: Tier, key: bytes, query: ScoreQuery) -> EncodedRows | None:
        try:
            encoded = await tier.get(key, _estimate_max_bytes(query))
            block = None if encoded is None else _verify_rows(encoded, query)
        except Corrupt as error:
            log.warning("cache: dropped entry %s of tier %s: %s", key.hex()[:16], tier.name, error)
            tier.counts.corrupt += 1
            tier.drop(key)
            encoded = block = None
        if encoded is None or block is None:
            tier.counts.misses += 1
            return None
        tier.counts.hits += 1
        return EncodedRows(encoded, block)


def _estimate_max_bytes(query: ScoreQuery) -> int:
    return max_encoded_bytes(query.rows, query.k, query.tail_samples or query.tail_draws)


def _verify_rows(encoded: bytes, query: ScoreQuery) -> RowBlock:
    block = decode_rows(encoded, _estimate_max_bytes(query))
    actual = len(block), block.k, block.tail_samples, block.tail_draws
    expected = query.rows, query.k, query.tail_samples, query.tail_draws
    if actual != expected:
        raise Corrupt(f"(rows, k, tail samples, tail draws) are {actual}, expected {expected}")
    return block


def _make_entry(key: bytes, query: ScoreQuery, scored: EncodedRows) -> StoredRows:
    return StoredRows(key, query.token_ids.tobytes(), query.start, scored.encoded)
