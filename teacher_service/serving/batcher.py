"""Collects queries into batches for the single thread that runs the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, Overloaded, Unavailable
from protos.rows.codec import RowBlock
from protos.rpc.failpoints import failpoint
from teacher_service.engines.base import Engine, EngineInfo
from teacher_service.metrics_page import TeacherMetrics

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Long enough to collect the requests of one burst, and short compared to a forward pass.
LINGER_SECONDS = 0.002
MAX_QUEUED_BYTES = 256 << 20
# An engine that fails this many batches in a row is broken; see Batcher.
MAX_FAILED_BATCHES = 3
_ENTRY_BYTES = 1024
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Scored:
    """The rows of one query, and the info of the engine with the weights that computed them."""

    block: RowBlock
    by: EngineInfo


class Sender:
    """One client's stream of queries; senders take turns, see Batcher.

    The queries of a sender that is `last` wait until no other query waits.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.last = last
        self.turn = 0.0  # of its newest query, in tokens


@dataclass(frozen=True, eq=False)
class _Waiting:
    query: ScoreQuery
    answer: asyncio.Future[Scored]
    order: tuple[bool, float]


class Batcher:
    """Batches queries and scores them on the engine thread.

    A batch has at most `max_batch_tokens` tokens, padding included; a longer sequence forms a batch
    of its own. While the engine is busy, new queries wait and form the next batch. An idle engine
    waits 2 ms for more queries before it scores the first one.

    Senders share the engine equally, by tokens (start-time fair queueing, Goyal et al. 1996): a
    query waits for those of its own sender, and for as many tokens of each other sender, not for
    all that came before it.

    A batch has failed if the engine raised for each of its queries alone, and for a short probe as
    well, so that the queries are not the cause. After `max_failed_batches` in a row the engine is
    broken: waiting and further queries get Unavailable, `broken` is True, and `on_broken` is
    called.

    It is an async context manager: entering starts the batching task, leaving stops it and cancels
    waiting queries. Use it from one event loop.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch_tokens: int,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        max_failed_batches: int = MAX_FAILED_BATCHES,
        on_broken: Callable[[], None] = lambda: None,
        metrics: TeacherMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics or TeacherMetrics()
        self._max_batch_tokens = max_batch_tokens
        self._max_queued_bytes = max_queued_bytes
        self._max_failed_batches = max_failed_batches
        self._failed_batches = 0
        self._on_broken = on_broken
        self.broken = False
        self._queued_bytes = 0
        self._queue: deque[_Waiting] = deque()
        self._turn = 0.0  # of the newest query that was taken
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

    @property
    def info(self) -> EngineInfo:
        """Info of the engine with its current weights; any thread may read it."""
        return self._engine.info

    @property
    def queued_tokens(self) -> int:
        """Number of tokens in waiting queries; any thread may read it."""
        waiting = (entry for entry in tuple(self._queue) if not entry.answer.done())
        return sum(len(entry.query.token_ids) for entry in waiting)

    async def between_batches(self, change: Callable[[], _T]) -> _T:
        """Run `change` on the engine thread, so that no batch is in progress; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, change)

    async def score(self, query: ScoreQuery, sender: Sender | None = None) -> Scored:
        """Return the rows of a validated query. Cancelling the call drops the query.

        Without a `sender`, the query is of a sender of its own. Raises Overloaded if waiting
        queries take more than `max_queued_bytes`, Unavailable if the engine is broken, and the
        error of the engine for this query.
        """
        if self.broken:
            raise stopping()
        size = query.nbytes + _ENTRY_BYTES
        if self._queued_bytes + size > self._max_queued_bytes:
            raise Overloaded(
                f"the queue of this teacher is full: {self._queued_bytes >> 20} MiB of requests",
                hint="retry in a second, or run a second teacher",
            )
        self._queued_bytes += size
        try:
            sender = sender or Sender()
            turn = max(self._turn, sender.turn)
            sender.turn = turn + len(query.token_ids)
            answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
            waiting = _Waiting(query, answer, (sender.last, turn))
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
        """Take the next query and, in order of turns, the others that fit into its batch."""
        batch: list[_Waiting] = []
        kept: deque[_Waiting] = deque()
        longest = 0
        for waiting in sorted(self._queue, key=lambda waiting: waiting.order):
            if waiting.answer.done():
                continue
            padded = max(longest, len(waiting.query.token_ids))
            if batch and padded * (len(batch) + 1) > self._max_batch_tokens:
                kept.append(waiting)
                continue
            batch.append(waiting)
            self._turn = max(self._turn, waiting.order[1])
            longest = padded
        self._queue = kept
        return batch

    async def _score(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        queries = [waiting.query for waiting in batch]
        answers = await loop.run_in_executor(self._thread, self._score_in_thread, queries)
        failpoint("batch-scored")
        if self._failed_batches >= self._max_failed_batches and not self.broken:
            error = next(answer for answer in answers if isinstance(answer, Exception))
            count = self._failed_batches
            log.error(
                "the engine failed %d batches in a row, so this teacher stops: %r", count, error
            )
            self.broken = True
            self._on_broken()
        if self.broken:
            for waiting in (*batch, *self._queue):
                if not waiting.answer.done():
                    waiting.answer.set_exception(stopping())
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(answer, Scored):
                waiting.answer.set_result(answer)
            else:
                waiting.answer.set_exception(answer)

    def _score_in_thread(self, queries: Sequence[ScoreQuery]) -> list[Scored | Exception]:
        answers = self._score_each(queries)
        raised = all(_is_defect(answer) for answer in answers)
        self._failed_batches = self._failed_batches + 1 if raised and self._probe_fails() else 0
        return answers

    def _probe_fails(self) -> bool:
        """True if the engine raises for a short query too: the fault is its own."""
        try:
            self._engine.score([probe(self._engine.info)])
        except Exception as error:
            return _is_defect(error)
        return False

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


def probe(info: EngineInfo) -> ScoreQuery:
    """Return a query of a few tokens, which every engine with this info can score."""
    tokens = np.arange(min(_PROBE_TOKENS, info.max_length), dtype=np.int32) % info.vocab_size
    return ScoreQuery(tokens, 1, top_k=1)


def stopping() -> Unavailable:
    """Return the error for requests to a teacher whose engine is broken."""
    return Unavailable(
        "this teacher stops, because its engine fails every batch",
        hint="read the teacher's log",
    )


def _is_defect(answer: Scored | Exception) -> bool:
    return isinstance(answer, Exception) and not isinstance(answer, DistillError)
