"""Collects queries into batches for the single thread that runs the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from protos.rpc.failpoints import failpoint
from teacher_service.engines.base import Engine
from teacher_service.serving.dispatcher import Dispatcher, is_defect, probe, stopping
from teacher_service.serving.fair_queue import Scored, Waiting

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Queries of one burst arrive less than this apart; the most that an idle engine waits for them.
GAP_SECONDS, LINGER_SECONDS = 0.002, 0.02
# A batch is chosen from the queries whose turn it is, of so many batches' tokens.
_CHOICE_BATCHES = 4


class Batcher(Dispatcher):
    """Batches queries and scores them on the engine thread.

    A batch has at most `max_batch_tokens` tokens, padding included; a longer sequence forms a batch
    of its own. The query whose turn it is decides the length: those of similar length join it, so
    that little is padded. While the engine is busy, new queries wait and form the next batch. An
    idle engine waits until none has arrived for 2 ms, at most 20 ms: the answers that end with a
    step of generation come one after the other, and the first would make a forward pass alone.

    A batch has failed if the engine raised for each of its queries alone, and for a short probe as
    well, so that the queries are not the cause.
    """

    def __init__(self, engine: Engine, *, max_batch_tokens: int, **options: Any) -> None:
        """`options`: of Dispatcher."""
        super().__init__(engine, **options)
        self._max_batch_tokens = max_batch_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await asyncio.to_thread(self._thread.shutdown)

    async def between_batches(self, change: Callable[[], _T]) -> _T:
        """Run `change` on the engine thread, so that no batch is in progress; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, change)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await self._linger()
            while batch := self._take():
                await self._score(batch)
            self._wake.clear()

    async def _linger(self) -> None:
        """Wait for the rest of a burst."""
        ends = time.monotonic() + LINGER_SECONDS
        arrived = -1
        while arrived != self._queue.arrived and time.monotonic() < ends:
            arrived = self._queue.arrived
            await asyncio.sleep(GAP_SECONDS)

    def _take(self) -> list[Waiting]:
        """Take the next query, and of those due soon the ones whose lengths are nearest to its."""
        due = self._queue.take(_CHOICE_BATCHES * self._max_batch_tokens)
        if not due:
            return []
        first = due.pop(0)

        def unlike(other: Waiting) -> tuple[bool, int]:
            return other.last and not first.last, abs(other.tokens - first.tokens)

        batch, longest = [first], first.tokens
        for other in sorted(due, key=unlike):
            padded = max(longest, other.tokens)
            if padded * (len(batch) + 1) <= self._max_batch_tokens:
                batch.append(other)
                longest = padded
            else:
                self._queue.give_back(other)
        for waiting in batch:
            self._queue.reach(waiting)
        return batch

    async def _score(self, batch: list[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        queries = [waiting.query for waiting in batch]
        answers, fault = await loop.run_in_executor(self._thread, self._score_in_thread, queries)
        failpoint("batch-scored")
        if fault is None:
            self._failures = 0
        else:
            self._count_failure(fault)
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.done():
                continue
            if self.broken:
                waiting.answer.set_exception(stopping())
            elif isinstance(answer, Scored):
                waiting.answer.set_result(answer)
            else:
                waiting.answer.set_exception(answer)

    def _score_in_thread(
        self, queries: Sequence[ScoreQuery]
    ) -> tuple[list[Scored | Exception], Exception | None]:
        """Return the answers, and the error of the engine if the batch has failed."""
        answers = self._score_each(queries)
        if all(is_defect(answer) for answer in answers):
            return answers, self._fault_of_probe()
        return answers, None

    def _fault_of_probe(self) -> Exception | None:
        """Return the error of the engine for a short query; None if it has none."""
        try:
            self._engine.score([probe(self._engine.info)])
        except Exception as error:
            return error if is_defect(error) else None
        return None

    def _score_each(self, queries: Sequence[ScoreQuery]) -> list[Scored | Exception]:
        try:
            return self._forward(queries)
        except Exception as error:
            # Retry each query alone, so that a bad query fails only itself, and a transient error
            # fails none.
            name = type(error).__name__
            log.warning("a batch of %d failed with %s; retrying each alone", len(queries), name)
            return [self._score_alone(query) for query in queries]

    def _score_alone(self, query: ScoreQuery) -> Scored | Exception:
        try:
            return self._forward([query])[0]
        except Exception as error:
            return error

    def _forward(self, queries: Sequence[ScoreQuery]) -> list[Scored | Exception]:
        by, began = self._engine.info, time.perf_counter()
        answers = self._engine.score(queries)
        assert len(answers) == len(queries), "the engine returns one result per query"
        self._metrics.forward(
            rows=sum(len(answer) for answer in answers if isinstance(answer, RowBlock)),
            fill=sum(len(query.token_ids) for query in queries) / self._max_batch_tokens,
            seconds=time.perf_counter() - began,
        )
        return [Scored(a, by) if isinstance(a, RowBlock) else a for a in answers]
