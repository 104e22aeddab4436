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
from teacher_service.engines.base import ScoringEngine
from teacher_service.serving.dispatcher import (
    Dispatcher,
    build_probe_query,
    build_stopping_error,
    is_defect,
)
from teacher_service.serving.fair_queue import EngineAnswer, QueuedQuery

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The maximum gap between queries of one burst, and the maximum time that an idle engine waits.
GAP_SECONDS, LINGER_SECONDS = 0.002, 0.02
# The queries of a batch are chosen among the next queries, whose tokens fill this many batches.
_CHOICE_BATCHES = 4


class Batcher(Dispatcher):
    """Batches queries and scores them on the engine thread.

    A batch has at most `max_batch_tokens` tokens, padding included; a longer sequence forms a batch
    of its own. A batch has the next query of the queue, and those waiting queries whose lengths are
    nearest to its length, so that there is little padding. While the engine is busy, new queries
    wait and form the next batch.

    An idle engine does not start at once. It waits until no query has arrived for 2 ms, but at most
    20 ms. Queries that follow a step of generation arrive one after the other, and without the
    pause the first query would make a forward pass alone.

    If a batch raises an error, each query is scored again alone. The engine has failed if all
    queries raise an error again, and a short probe query raises an error too. Then the queries are
    not the cause.
    """

    def __init__(self, engine: ScoringEngine, *, max_batch_tokens: int, **options: Any) -> None:
        """`options` are the options of Dispatcher."""
        super().__init__(engine, **options)
        self._max_batch_tokens = max_batch_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await asyncio.to_thread(self._thread.shutdown)

    async def run_between_batches(self, change: Callable[[], _T]) -> _T:
        """Run `change` on the engine thread, so that no batch is in progress; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, change)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await self._linger()
            while batch := self._take_batch():
                await self._score(batch)
            self._wake.clear()

    async def _linger(self) -> None:
        """Wait until no query has arrived for GAP_SECONDS, but at most LINGER_SECONDS."""
        deadline = time.monotonic() + LINGER_SECONDS
        arrivals = -1
        while arrivals != self._queue.arrival_count and time.monotonic() < deadline:
            arrivals = self._queue.arrival_count
            await asyncio.sleep(GAP_SECONDS)

    def _take_batch(self) -> list[QueuedQuery]:
        """Take the next query, and those later queries whose lengths are nearest to its length."""
        due_queries = self._queue.take(_CHOICE_BATCHES * self._max_batch_tokens)
        if not due_queries:
            return []
        first_query = due_queries.pop(0)

        def compare_length(candidate: QueuedQuery) -> tuple[bool, int]:
            return candidate.is_background and not first_query.is_background, abs(
                candidate.tokens - first_query.tokens
            )

        batch, longest = [first_query], first_query.tokens
        for candidate in sorted(due_queries, key=compare_length):
            padded = max(longest, candidate.tokens)
            if padded * (len(batch) + 1) <= self._max_batch_tokens:
                batch.append(candidate)
                longest = padded
            else:
                self._queue.put_back(candidate)
        for entry in batch:
            self._queue.advance_to(entry)
        return batch

    async def _score(self, batch: list[QueuedQuery]) -> None:
        loop = asyncio.get_running_loop()
        queries = [entry.query for entry in batch]
        answers, engine_error = await loop.run_in_executor(
            self._thread, self._score_in_thread, queries
        )
        failpoint("batch-scored")
        if engine_error is None:
            self._failures = 0
        else:
            self._count_failure(engine_error)
        for entry, answer in zip(batch, answers, strict=True):
            if entry.answer.done():
                continue
            if self.broken:
                entry.answer.set_exception(build_stopping_error())
            elif isinstance(answer, EngineAnswer):
                entry.answer.set_result(answer)
            else:
                entry.answer.set_exception(answer)

    def _score_in_thread(
        self, queries: Sequence[ScoreQuery]
    ) -> tuple[list[EngineAnswer | Exception], Exception | None]:
        """Return the answers, and the error of the engine if the engine has failed, else None."""
        answers = self._score_each(queries)
        if all(is_defect(answer) for answer in answers):
            return answers, self._probe_engine()
        return answers, None

    def _probe_engine(self) -> Exception | None:
        """Score a short query. Return the error if the engine fails, else None."""
        try:
            self._engine.score([build_probe_query(self._engine.info)])
        except Exception as error:  # noqa: BLE001 (the caller judges it)
            return error if is_defect(error) else None
        return None

    def _score_each(self, queries: Sequence[ScoreQuery]) -> list[EngineAnswer | Exception]:
        try:
            return self._run_forward(queries)
        except Exception as error:  # noqa: BLE001 (each query is retried alone)
            # Retry each query alone, so that a bad query fails only itself, and a transient error
            # fails no query.
            name = type(error).__name__
            log.warning("a batch of %d failed with %s; retrying each alone", len(queries), name)
            return [self._score_alone(query) for query in queries]

    def _score_alone(self, query: ScoreQuery) -> EngineAnswer | Exception:
        try:
            return self._run_forward([query])[0]
        except Exception as error:  # noqa: BLE001 (the query fails with it)
            return error

    def _run_forward(self, queries: Sequence[ScoreQuery]) -> list[EngineAnswer | Exception]:
        info, start = self._engine.info, time.perf_counter()
        answers = self._engine.score(queries)
        assert len(answers) == len(queries), "the engine returns one result per query"
        self._metrics.record_forward(
            rows=sum(len(answer) for answer in answers if isinstance(answer, RowBlock)),
            fill=sum(len(query.token_ids) for query in queries) / self._max_batch_tokens,
            seconds=time.perf_counter() - start,
        )
        return [
            EngineAnswer(answer, info) if isinstance(answer, RowBlock) else answer
            for answer in answers
        ]
