"""The base class of the two schedulers: the Batcher, and the Feeder for continuous batching."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import numpy as np

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, Unavailable
from teacher_service.engines.base import ImageEngine, ScoringEngine, ScoringEngineInfo
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.fair_queue import MAX_QUEUED_BYTES, EngineAnswer, FairQueue, Sender

log = logging.getLogger(__name__)

# Consecutive failures after which an engine is broken; see Dispatcher.
MAX_FAILURES = 3
_PROBE_TOKENS = 8
# Maximum queries with decoded images, waiting or in the engine: a pixel takes 24 bytes, so an image
# of a megapixel takes 24 MB.
_MAX_DECODED = 16


class Dispatcher(ABC):
    """Base class: sends queries to the engine, in the order of a FairQueue.

    The engine is broken after `max_failures` failures in a row; the subclass defines a failure.
    Then waiting and new queries get Unavailable, `broken` is True, and `on_broken` is called.

    A dispatcher is an async context manager: entering starts a task; leaving stops the task and
    cancels waiting queries. Use this class from one event loop.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_failures: int = MAX_FAILURES,
        on_broken: Callable[[], None] = lambda: None,
        metrics: TeacherMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics or TeacherMetrics()
        self._max_failures = max_failures
        self._failures = 0  # in a row
        self._on_broken = on_broken
        self.broken = False
        self._queue = FairQueue(max_queued_bytes)
        self._wake = asyncio.Event()
        self._image_slots = asyncio.Semaphore(_MAX_DECODED)

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        self._queue.cancel()

    @property
    def info(self) -> ScoringEngineInfo:
        """Info of the engine with its current weights; any thread may read it."""
        return self._engine.info

    @property
    def queued_tokens(self) -> int:
        """Number of tokens in waiting queries; any thread may read it."""
        return self._queue.tokens

    async def score(self, query: ScoreQuery, sender: Sender | None = None) -> EngineAnswer:
        """Return the rows of a validated query. Cancelling the call drops the query.

        Without a `sender`, the query gets a new sender. Raises Overloaded if waiting queries take
        more than `max_queued_bytes`, Unavailable if the engine is broken, and the error of the
        engine for this query. Images are decoded first; at most 16 queries with images wait.
        """
        if not query.images:
            return await self._enqueue(query, sender)
        assert isinstance(self._engine, ImageEngine), "validation allows images only here"
        async with self._image_slots:
            expanded_query = await asyncio.to_thread(self._engine.expand_images, query)
            return await self._enqueue(expanded_query, sender)

    async def _enqueue(self, query: ScoreQuery, sender: Sender | None) -> EngineAnswer:
        if self.broken:
            raise build_stopping_error()
        entry = self._queue.add(query, sender or Sender())
        try:
            self._wake.set()
            return await entry.answer
        finally:
            self._queue.release(entry)

    @abstractmethod
    async def _run(self) -> None:
        """Give queries to the engine until cancelled."""

    def _count_failure(self, error: Exception) -> None:
        """Count a failure; the engine is broken after `max_failures` failures in a row."""
        self._failures += 1
        if self._failures < self._max_failures or self.broken:
            return
        log.error(
            "the engine failed %d times in a row, so this teacher stops: %r", self._failures, error
        )
        self.broken = True
        self._on_broken()
        self._queue.fail(build_stopping_error())


def build_probe_query(info: ScoringEngineInfo) -> ScoreQuery:
    """Return a query of a few tokens, which every engine with this info can score."""
    tokens = np.arange(min(_PROBE_TOKENS, info.max_length), dtype=np.int32) % info.vocab_size
    return ScoreQuery(tokens, 1, top_k=1)


def is_defect(answer: object) -> bool:
    """Return True if `answer` is an error of the engine, and not an error of one query."""
    return isinstance(answer, Exception) and not isinstance(answer, DistillError)


def build_stopping_error() -> Unavailable:
    """Return the error for requests to a teacher whose engine is broken."""
    return Unavailable(
        "this teacher stops, because its engine fails every query",
        hint="read the teacher's log",
    )
