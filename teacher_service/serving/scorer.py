"""Returns the rows of validated queries, from the cache or from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import xxhash

from clients.teacher.query import ScoreQuery, row_key
from protos import teacher_pb2
from protos.rows.codec import HEADER_BYTES, RowBlock, encode_rows
from protos.rpc.transport import MAX_CHUNK_BYTES
from teacher_service.cache.row_cache import EncodedRows, RowCache
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.serving.dispatcher import Dispatcher
from teacher_service.serving.fair_queue import Sender

_ENVELOPE_BYTES = 1024  # the other fields of a ScoreChunk


@dataclass(frozen=True)
class RowAnswer:
    """The rows of one query, all computed with the weights of `version`."""

    rows: EncodedRows
    version: int


@dataclass(eq=False)
class _Flight:
    """A scoring in progress. `waiters` is the number of equal queries that wait for its result."""

    task: asyncio.Task[RowAnswer]
    waiters: int = 0


class RowScorer:
    """Scores queries through the cache; equal queries in flight are scored once.

    With `cache` None, rows are not cached. Use this class from one event loop.
    """

    def __init__(self, dispatcher: Dispatcher, cache: RowCache | None) -> None:
        self._dispatcher = dispatcher
        self._cache = cache
        self._flights: dict[tuple[bytes, bool], _Flight] = {}

    def tiers(self) -> dict[str, tuple[int, int]]:
        """Return (hits, misses) of each cache tier by name, since the start of the program."""
        return self._cache.hits_and_misses() if self._cache else {}

    async def score(self, query: ScoreQuery, sender: Sender | None = None) -> RowAnswer:
        """Return the rows of `query`, all from one version of the weights.

        For `sender`, see FairQueue. Equal queries in flight are scored once. There is one
        exception: a query of a background sender and an equal query of another sender are scored
        separately, because the other sender would otherwise wait for background work.

        If a weight update is applied before the query is scored, the rows are from the new version.
        Raises Overloaded if the queue is full, or the error of the engine.
        """
        info = self._dispatcher.info
        key = _compute_key(query, info), sender is not None and sender.is_background
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.create_task(self._find_or_score(query, sender)))
            self._flights[key] = flight
        flight.waiters += 1
        try:
            # If one caller is cancelled, other callers still wait; an error reaches all callers.
            await asyncio.wait([flight.task])
            return flight.task.result()
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                flight.task.cancel()
            if self._flights.get(key) is flight and (flight.task.done() or not flight.waiters):
                del self._flights[key]

    async def _find_or_score(self, query: ScoreQuery, sender: Sender | None) -> RowAnswer:
        cached_answer = await self._find_cached(query)
        if cached_answer is not None:
            return cached_answer
        answer = await self._dispatcher.score(query, sender)
        encoded_rows = _encode_rows(answer.block, query)
        if self._cache:
            # Use the weights that computed the rows: they may be newer than the request.
            encoded_rows = self._cache.put(_compute_key(query, answer.info), query, encoded_rows)
        return RowAnswer(encoded_rows, answer.info.version)

    async def _find_cached(self, query: ScoreQuery) -> RowAnswer | None:
        """Return cached rows of the current weights; retry if the weights change meanwhile."""
        while self._cache is not None:
            info = self._dispatcher.info
            key = _compute_key(query, info)
            cached_rows = await self._cache.get(key, query)
            if key == _compute_key(query, self._dispatcher.info):
                return RowAnswer(cached_rows, info.version) if cached_rows else None
        return None


def _compute_key(query: ScoreQuery, info: ScoringEngineInfo) -> bytes:
    return row_key(info.fingerprint_for(query.adapter), info.version, query)


def _encode_rows(block: RowBlock, query: ScoreQuery) -> EncodedRows:
    if query.head_ids is not None:
        # A client that sent head ids already has them.
        block = replace(block, head_ids=None)
    return EncodedRows(encode_rows(block, f32=query.f32), block)


def split_into_chunks(
    answer: RowAnswer, query: ScoreQuery, request_id: str, next_position: int
) -> Iterator[teacher_pb2.ScoreChunk]:
    """Yield the rows from position `next_position` on, in order, in chunks of MAX_CHUNK_BYTES.

    `next_position` 0 means all rows. Every chunk has the digest of all rows of the sequence. A
    client that resumes compares the digests, and so notices if the rows were computed again with
    another result.
    """
    encoded_rows = answer.rows
    row_bytes = max(1, (len(encoded_rows.encoded) - HEADER_BYTES) // query.rows + 1)
    step = max(1, (MAX_CHUNK_BYTES - HEADER_BYTES - _ENVELOPE_BYTES) // row_bytes)
    digest = xxhash.xxh3_64_intdigest(encoded_rows.encoded)
    first = max(next_position, query.start) - query.start
    for first_row in range(first, query.rows, step):
        last = min(first_row + step, query.rows)
        is_whole = (first_row, last) == (0, query.rows)
        block = encoded_rows.block.slice(first_row, last)
        yield teacher_pb2.ScoreChunk(
            request_id=request_id,
            first_position=query.start + first_row,
            count=last - first_row,
            payload=encoded_rows.encoded if is_whole else encode_rows(block, f32=query.f32),
            last=last == query.rows,
            scoring_digest=digest,
            version=answer.version,
        )
