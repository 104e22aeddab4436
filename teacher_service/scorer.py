"""From a valid query to its rows: the cache first, then the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import xxhash

from clients.score_query import ScoreQuery, row_key
from protos import teacher_pb2
from protos.rows import HEADER_BYTES, encode_rows
from protos.transport import MAX_CHUNK_BYTES
from teacher_service.batcher import Batcher
from teacher_service.cache import RowCache, ScoredSequence

_ENVELOPE_BYTES = 1024  # the other fields of a ScoreChunk


class Scorer:
    """`cache` None: every query is scored."""

    def __init__(self, batcher: Batcher, cache: RowCache | None, *, fingerprint: str) -> None:
        self._batcher = batcher
        self._cache = cache
        self._fingerprint = fingerprint
        self.version = 0

    async def score(self, query: ScoreQuery) -> ScoredSequence:
        """The rows of `query` by this version of the teacher; raises what the engine or the queue
        says.
        """
        if self._cache is None:
            return await self._run_engine(query)
        key = row_key(self._fingerprint, self.version, query)
        found = await self._cache.get(key, query)
        if found is not None:
            return found
        return self._cache.put(key, query, await self._run_engine(query))

    async def _run_engine(self, query: ScoreQuery) -> ScoredSequence:
        block = await self._batcher.score(query)
        if query.head_ids is not None:
            # Who chose the ids has them.
            block = replace(block, head_ids=None)
        return ScoredSequence(encode_rows(block, f32=query.f32), block)


def chunks_of(
    scored: ScoredSequence, query: ScoreQuery, request_id: str, next_position: int
) -> Iterator[teacher_pb2.ScoreChunk]:
    """The rows from `next_position` (0: all) on, in order, in messages of MAX_CHUNK_BYTES."""
    row_bytes = max(1, (len(scored.encoded) - HEADER_BYTES) // query.rows + 1)
    step = max(1, (MAX_CHUNK_BYTES - HEADER_BYTES - _ENVELOPE_BYTES) // row_bytes)
    digest = xxhash.xxh3_64_intdigest(scored.encoded)
    first = max(next_position, query.start) - query.start
    for at in range(first, query.rows, step):
        last = min(at + step, query.rows)
        whole = (at, last) == (0, query.rows)
        block = scored.block.slice(at, last)
        yield teacher_pb2.ScoreChunk(
            request_id=request_id,
            first_position=query.start + at,
            count=last - at,
            payload=scored.encoded if whole else encode_rows(block, f32=query.f32),
            last=last == query.rows,
            scoring_digest=digest,
        )
