"""Feeds queries to an engine that batches by itself, so that it never waits for a batch to end."""

from __future__ import annotations

import asyncio
import logging
import time
from math import ceil
from typing import Any

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError
from teacher_service.engines.base import ContinuousEngine, QuerySchedule
from teacher_service.serving.dispatcher import Dispatcher, is_defect, probe, stopping
from teacher_service.serving.fair_queue import Scored, Waiting

log = logging.getLogger(__name__)

# Steps of the engine whose tokens are in flight. Fewer leave steps part empty, because a query that
# an engine computes in several steps counts until it ends.
_STEPS_IN_FLIGHT = 4
_LAST = 1 << 52  # tokens; more than a teacher ever computes
# Steps are short for so long after the answer to a client that asks singly.
_SHORT_SECONDS = 1.0
# The least part of a full step that a short one has, so that the engine stays efficient.
_LEAST_STEP = 1 / 16


class Feeder(Dispatcher):
    """Gives queries to the engine while it has less than four steps to do, answers each as it ends.

    The queries in flight have the tokens of four steps of the engine, without padding, and at most
    one query more. So the engine finds a full step whenever one ends, however long the queries are.
    A sender without a query in flight does not wait for a place: the engine gets its query at once,
    with a turn before those of the queries that the engine has not begun. So the query of a light
    client beside a heavy one is in the step that follows the present one, however deep the queue of
    the other; with several heavy clients, turns are by tokens.

    A full step may take much longer than such a query alone. So steps are short while a client that
    sends one query after the other does so, and a second longer, beside clients that send many: as
    long as its query, and the step before it half as long; see SharingScheduler for vLLM.

    The engine has failed if it raised for a query twice, and for a short probe as well, so that the
    query is not the cause.
    """

    def __init__(self, engine: ContinuousEngine, **options: Any) -> None:
        """`options`: of Dispatcher."""
        super().__init__(engine, **options)
        self._continuous = engine
        self._most = _STEPS_IN_FLIGHT * engine.step_tokens
        self._tokens_in_flight = 0
        self._single_tokens = 0  # of them, those of clients that ask singly
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
            while (first := self._queue.first()) and self._has_place(first):
                self._start(*self._queue.take(1))

    def _has_place(self, waiting: Waiting) -> bool:
        alone = not waiting.last and not waiting.sender.in_engine
        return alone or self._tokens_in_flight < self._most

    def _start(self, waiting: Waiting) -> None:
        single = waiting.tokens if waiting.sender.asks_singly else 0
        self._tokens_in_flight += waiting.tokens
        self._single_tokens += single
        waiting.sender.in_engine += 1
        step_tokens = self._step_tokens(single)
        # A turn as much earlier as such queries are long: no other one comes between in the step
        # that it waits for, and the shares stay as they are.
        number = _number_of(waiting) - (self._short_tokens if single else 0)
        turn = QuerySchedule(number, step_tokens, single > 0)
        task = asyncio.create_task(self._answer(waiting, turn))
        self._tasks.add(task)

        def end(_: object) -> None:
            self._tasks.discard(task)
            self._tokens_in_flight -= waiting.tokens
            self._single_tokens -= single
            if single:
                self._short_until = time.monotonic() + _SHORT_SECONDS
            waiting.sender.in_engine -= 1
            self._queue.reach(waiting)
            self._wake.set()

        task.add_done_callback(end)
        # Nobody wants the rows any more: the engine need not compute them.
        waiting.answer.add_done_callback(lambda answer: answer.cancelled() and task.cancel())

    def _step_tokens(self, single: int) -> int:
        """Return the most tokens of a step, 0 for a full one.

        `single`: tokens of the query that follows, if its sender asks singly.
        """
        if not self._single_tokens and time.monotonic() > self._short_until:
            self._short_tokens = 0
        if single:
            self._short_tokens = max(self._short_tokens, self._single_tokens)
        if not self._short_tokens or self._single_tokens == self._tokens_in_flight:
            return 0
        full = self._continuous.step_tokens
        return min(full, max(self._short_tokens, ceil(_LEAST_STEP * full)))

    async def _answer(self, waiting: Waiting, turn: QuerySchedule) -> None:
        found: Scored | Exception
        try:
            found = await self._scored(waiting.query, turn)
        except asyncio.CancelledError:
            waiting.answer.cancel()
            raise
        except Exception as error:
            found = error
        if waiting.answer.done():
            return
        if isinstance(found, Scored):
            self._failures = 0
            waiting.answer.set_result(found)
        else:
            if is_defect(found) and (fault := await self._fault_of_probe()) is not None:
                self._count_failure(fault)
            if not waiting.answer.done():
                waiting.answer.set_exception(stopping() if self.broken else found)

    async def _scored(self, query: ScoreQuery, turn: QuerySchedule) -> Scored:
        """Return the rows of a query. A query that fails gets a second try, in case of chance."""
        by, began = self._engine.info, time.perf_counter()
        try:
            block = await self._continuous.score_one(query, turn)
        except DistillError:
            raise
        except Exception as error:
            log.warning("a query failed with %s; a second try follows", type(error).__name__)
            block = await self._continuous.score_one(query, turn)
        self._metrics.forward(
            rows=len(block),
            fill=min(1.0, self._tokens_in_flight / self._most),
            seconds=time.perf_counter() - began,
        )
        return Scored(block, by)

    async def _fault_of_probe(self) -> Exception | None:
        """Return the error of the engine for a short query; None if it has none."""
        try:
            await self._continuous.score_one(probe(self._engine.info), QuerySchedule())
        except Exception as error:
            return error if is_defect(error) else None
        return None


def _number_of(waiting: Waiting) -> int:
    """Return the number of a query's turn: those of `last` senders follow all others."""
    return int(waiting.turn) + (_LAST if waiting.last else 0)
