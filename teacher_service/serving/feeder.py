"""Feeds queries to an engine with continuous batching."""

from __future__ import annotations

import asyncio
import logging
import time
from math import ceil
from typing import Any

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError
from teacher_service.engines.base import ContinuousEngine, QuerySchedule
from teacher_service.serving.dispatcher import (
    Dispatcher,
    build_probe_query,
    build_stopping_error,
    is_defect,
)
from teacher_service.serving.fair_queue import EngineAnswer, QueuedQuery

log = logging.getLogger(__name__)

# The number of steps of the engine whose tokens are in flight. With fewer tokens in flight, steps
# would not be full, because a query that an engine computes in several steps counts until its end.
_STEPS_IN_FLIGHT = 4
_BACKGROUND_TURN = 1 << 52  # tokens; more than a teacher ever computes
# Steps stay short for this long after the answer to a client that sends one query at a time.
_SHORT_SECONDS = 1.0
# A short step has at least this fraction of the tokens of a full step, for efficiency.
_MIN_STEP_FRACTION = 1 / 16


class Feeder(Dispatcher):
    """Keeps about four steps of tokens in the engine, and answers each query when it ends.

    The queries in flight have the tokens of four steps of the engine, without padding, plus at most
    one query. Therefore a full step is always ready. If a sender has no query in flight, its query
    goes to the engine at once, before all queries that the engine has not begun. Therefore the
    query of a client with few queries is in the next step, even if another client has a long queue.
    Several busy clients take turns by tokens.

    A full step can take much longer than a single query. Therefore steps are short while one client
    sends one query at a time and other clients send many, and for one second after that. A short
    step has the tokens of the single query, and the step before it has half as many; see
    SharingScheduler.

    The engine has failed if a query fails twice and a short probe query fails too.
    """

    def __init__(self, engine: ContinuousEngine, **options: Any) -> None:
        """`options` are the options of Dispatcher."""
        super().__init__(engine, **options)
        self._continuous = engine
        self._max_tokens_in_flight = _STEPS_IN_FLIGHT * engine.step_tokens
        self._tokens_in_flight = 0
        self._single_tokens = 0  # in flight, of clients that send one query at a time
        self._short_until, self._short_tokens = 0.0, 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (next_query := self._queue.peek()) and self._has_place(next_query):
                self._start(*self._queue.take(1))

    def _has_place(self, entry: QueuedQuery) -> bool:
        has_own_place = not entry.is_background and not entry.sender.queries_in_engine
        return has_own_place or self._tokens_in_flight < self._max_tokens_in_flight

    def _start(self, entry: QueuedQuery) -> None:
        single_tokens = entry.tokens if entry.sender.sends_singly else 0
        self._tokens_in_flight += entry.tokens
        self._single_tokens += single_tokens
        entry.sender.queries_in_engine += 1
        step_tokens = self._limit_step_tokens(single_tokens)
        # A single query gets a smaller number, so that the engine puts no other query before it
        # into the next step. The turns and shares of the queue do not change.
        number = _compute_turn_number(entry) - (self._short_tokens if single_tokens else 0)
        schedule = QuerySchedule(number, step_tokens, single_tokens > 0)
        task = asyncio.create_task(self._answer(entry, schedule))
        self._tasks.add(task)

        def finish(_: object) -> None:
            self._tasks.discard(task)
            self._tokens_in_flight -= entry.tokens
            self._single_tokens -= single_tokens
            if single_tokens:
                self._short_until = time.monotonic() + _SHORT_SECONDS
            entry.sender.queries_in_engine -= 1
            self._queue.advance_to(entry)
            self._wake.set()

        task.add_done_callback(finish)
        # If the caller cancels the query, the engine does not need to compute the rows.
        entry.answer.add_done_callback(lambda answer: answer.cancelled() and task.cancel())

    def _limit_step_tokens(self, single_tokens: int) -> int:
        """Return the maximum number of tokens of a step; 0 means a full step.

        `single_tokens` is the number of tokens of the query that starts now, if its sender sends
        one query at a time; otherwise 0.
        """
        if not self._single_tokens and time.monotonic() > self._short_until:
            self._short_tokens = 0
        if single_tokens:
            self._short_tokens = max(self._short_tokens, self._single_tokens)
        if not self._short_tokens or self._single_tokens == self._tokens_in_flight:
            return 0
        full_step_tokens = self._continuous.step_tokens
        return min(
            full_step_tokens, max(self._short_tokens, ceil(_MIN_STEP_FRACTION * full_step_tokens))
        )

    async def _answer(self, entry: QueuedQuery, schedule: QuerySchedule) -> None:
        answer: EngineAnswer | Exception
        try:
            answer = await self._score_with_retry(entry.query, schedule)
        except asyncio.CancelledError:
            entry.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 (the query fails with it)
            answer = error
        if entry.answer.done():
            return
        if isinstance(answer, EngineAnswer):
            self._failures = 0
            entry.answer.set_result(answer)
        else:
            if is_defect(answer) and (engine_error := await self._probe_engine()) is not None:
                self._count_failure(engine_error)
            if not entry.answer.done():
                entry.answer.set_exception(build_stopping_error() if self.broken else answer)

    async def _score_with_retry(self, query: ScoreQuery, schedule: QuerySchedule) -> EngineAnswer:
        """Return the rows of a query. If it fails, try once more: the error may be transient."""
        info, start = self._engine.info, time.perf_counter()
        try:
            block = await self._continuous.score_one(query, schedule)
        except DistillError:
            raise
        except Exception as error:  # noqa: BLE001 (the query is retried once)
            log.warning("a query failed with %s; a second try follows", type(error).__name__)
            block = await self._continuous.score_one(query, schedule)
        self._metrics.record_forward(
            rows=len(block),
            fill=min(1.0, self._tokens_in_flight / self._max_tokens_in_flight),
            seconds=time.perf_counter() - start,
        )
        return EngineAnswer(block, info)

    async def _probe_engine(self) -> Exception | None:
        """Score a short query. Return the error if the engine fails, else None."""
        try:
            await self._continuous.score_one(build_probe_query(self._engine.info), QuerySchedule())
        except Exception as error:  # noqa: BLE001 (the caller judges it)
            return error if is_defect(error) else None
        return None


def _compute_turn_number(entry: QueuedQuery) -> int:
    """Return the turn of a query as an integer. Queries of background senders follow all others."""
    return int(entry.turn) + (_BACKGROUND_TURN if entry.is_background else 0)
