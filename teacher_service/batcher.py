"""Collects queries into batches for the one thread that runs the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from clients.score_query import ScoreQuery
from protos.errors import Overloaded
from protos.rows import RowBlock
from teacher_service.engines.base import Engine

# Long enough for the requests of one burst to meet, short against any forward pass.
LINGER_SECONDS = 0.002
MAX_QUEUED_BYTES = 256 << 20
_ENTRY_BYTES = 1024


@dataclass(frozen=True, eq=False)
class _Waiting:
    query: ScoreQuery
    answer: asyncio.Future[RowBlock]


class Batcher:
    """A batch holds at most `max_batch_tokens` padded tokens; a longer sequence goes alone.

    While the engine works, later queries wait and form the next batch; only an idle engine lingers.
    """

    def __init__(
        self, engine: Engine, *, max_batch_tokens: int, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def __aenter__(self) -> Batcher:
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        for waiting in self._queue:
            waiting.answer.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    async def score(self, query: ScoreQuery) -> RowBlock:
        """The rows of a valid query. Raises Overloaded when too much waits; cancelling drops the
        query.
        """
        size = query.nbytes + _ENTRY_BYTES
        if self._queued_bytes + size > self._max_queued_bytes:
            raise Overloaded(
                f"{self._queued_bytes >> 20} MiB of requests wait for this teacher",
                hint="try again in a second, or run a second teacher",
            )
        self._queued_bytes += size
        try:
            waiting = _Waiting(query, asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._wake.set()
            return await waiting.answer
        finally:
            self._queued_bytes -= size

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(LINGER_SECONDS)
            while batch := self._take():
                await self._score(batch)
            self._wake.clear()

    def _take(self) -> list[_Waiting]:
        """The oldest query, and the others in order that fit beside it."""
        batch: list[_Waiting] = []
        kept: deque[_Waiting] = deque()
        longest = 0
        for waiting in self._queue:
            if waiting.answer.done():
                continue
            padded = max(longest, len(waiting.query.token_ids))
            if batch and padded * (len(batch) + 1) > self._max_batch_tokens:
                kept.append(waiting)
                continue
            batch.append(waiting)
            longest = padded
        self._queue = kept
        return batch

    async def _score(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        queries = [waiting.query for waiting in batch]
        answers = await loop.run_in_executor(self._thread, self._score_in_thread, queries)
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(answer, RowBlock):
                waiting.answer.set_result(answer)
            else:
                waiting.answer.set_exception(answer)

    def _score_in_thread(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | Exception]:
        try:
            answers: list[RowBlock | Exception] = [*self._engine.score(queries)]
            assert len(answers) == len(queries), "one answer a query"
            return answers
        except Exception as error:
            if len(queries) == 1:
                return [error]
            # One of them did it: alone, it fails only itself.
            return [answer for query in queries for answer in self._score_in_thread([query])]
