"""The future of one query, and the assembly of its rows, which all come from one scoring.

If a caller waits for a future, its request is sent even above the prefetch limit.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from clients.teacher.query import ScoreQuery, answer_bytes
from protos import teacher_pb2
from protos.errors import Corrupt
from protos.rows.checks import check_rows
from protos.rows.codec import RowBlock, decode_rows, max_encoded_bytes

_ENTRY_BYTES = 2048  # estimated memory of a request and its future, rows excluded


class RowAssembly:
    """The rows of a query that have arrived so far, maybe over several connections.

    Not thread-safe.
    """

    def __init__(self, query: ScoreQuery) -> None:
        self._query = query
        self.restart()

    @property
    def next_position(self) -> int:
        """Position of the first missing row."""
        return self._query.start + self._received_rows

    @property
    def resume_position(self) -> int:
        """Position from which a new request asks for rows; 0 (all rows) if no row has arrived."""
        return self.next_position if self._received_rows else 0

    def restart(self) -> None:
        """Discard all rows received so far."""
        self._received_rows = 0
        self._block: RowBlock | None = None
        self._digest: int | None = None

    def continues(self, chunk: teacher_pb2.ScoreChunk) -> bool:
        """True if the chunk is from the same scoring as the rows received so far."""
        return self._digest in (None, chunk.scoring_digest)

    def add(self, chunk: teacher_pb2.ScoreChunk, vocab_size: int) -> RowBlock | None:
        """Append the rows of a chunk. Return all rows, with head ids, if they are complete, else
        None.

        `vocab_size`: number of the teacher's logits. Raises Corrupt if rows are missing, duplicate
        or damaged, have an unexpected shape or dtype or unexpected ids, or have values that are not
        log-probs.
        """
        query, expected_position = self._query, self.next_position
        missing_rows = len(query.token_ids) - expected_position
        max_bytes = max_encoded_bytes(missing_rows, query.k, query.tail_samples or query.tail_draws)
        block = decode_rows(chunk.payload, max_bytes)
        if chunk.first_position != expected_position or not 0 < len(block) <= missing_rows:
            raise Corrupt(
                f"the teacher sent {len(block)} rows from position {chunk.first_position}, but 1 to"
                f" {missing_rows} rows from position {expected_position} were expected"
            )
        chosen_by_teacher = block.head_ids is not None
        if block.k != query.k or chosen_by_teacher != (query.head_ids is None):
            with_ids = "with" if chosen_by_teacher else "without"
            raise Corrupt(
                f"the teacher sent rows {with_ids} head ids and with k = {block.k}, but the query"
                f" has k = {query.k}"
            )
        if (block.tail_samples, block.tail_draws) != (query.tail_samples, query.tail_draws):
            raise Corrupt(
                f"the teacher sent rows with tail_samples = {block.tail_samples} and tail_draws ="
                f" {block.tail_draws}, but the query has tail_samples = {query.tail_samples} and"
                f" tail_draws = {query.tail_draws}",
                hint="use the same version of distill-service for the teacher and the job",
            )
        if len(block) != chunk.count or chunk.last != (len(block) == missing_rows):
            raise Corrupt(
                f"the teacher sent {len(block)} rows, but announced {chunk.count} rows and last ="
                f" {chunk.last}"
            )
        if (block.head_logprobs.dtype == np.float32) != query.f32:
            raise Corrupt(
                f"the teacher sent {block.head_logprobs.dtype} log-probs, but"
                f" {'float32' if query.f32 else 'float16'} was requested"
            )
        check_rows(block, query.vocab_size or vocab_size)
        self._digest = chunk.scoring_digest
        block_so_far = self._copy_rows(block)
        return block_so_far if chunk.last else None

    def _copy_rows(self, block: RowBlock) -> RowBlock:
        # Copy into one allocation: decoded rows are read-only views that keep the message alive,
        # and torch needs writable arrays.
        if self._block is None:
            self._block = _allocate_block(self._query)
        target = self._block
        start, end = self._received_rows, self._received_rows + len(block)
        for column in fields(RowBlock):
            values = getattr(block, column.name)
            if values is not None:
                getattr(target, column.name)[start:end] = values
        self._received_rows = end
        return target


def _allocate_block(query: ScoreQuery) -> RowBlock:
    shape = (query.rows, query.k)
    has_samples, draw_shape = query.tail_samples > 0, (query.rows, query.tail_draws)
    logprob_dtype = np.float32 if query.f32 else np.float16
    return RowBlock(
        head_ids=np.empty(shape, np.int32) if query.head_ids is None else query.head_ids,
        head_logprobs=np.empty(shape, logprob_dtype),
        tail_logmass=np.empty(query.rows, np.float32),
        token_logprobs=np.empty(query.rows, np.float32),
        tail_sample_ids=np.empty((query.rows, query.tail_samples), np.int32)
        if has_samples
        else None,
        tail_sample_logprob=np.empty(query.rows, np.float32) if has_samples else None,
        draw_logprobs=np.empty(draw_shape, logprob_dtype) if query.tail_draws else None,
    )


class Window(Protocol):
    """The queue to which an answer belongs; see PendingRequests."""

    def want(self, answer: PendingAnswer) -> None:
        """Send the request of `answer` even above the prefetch limit: a caller waits for it."""
        ...

    def release(self, answer: PendingAnswer) -> None:
        """Exclude the rows of `answer` from the bytes that the prefetch limit bounds."""
        ...


class _Waiters(list[Any]):
    """The list of a future's waiters. `concurrent.futures.wait` and `as_completed` add waiters to
    it.

    Each added waiter marks the future as awaited, as a call of `result` does.
    """

    def __init__(self, answer: PendingAnswer) -> None:
        super().__init__()
        self._answer = weakref.ref(answer)

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        answer = self._answer()
        if answer is not None:
            answer.want()


class PendingAnswer(Future[RowBlock]):
    """The future of one query.

    The prefetch limit bounds the bytes of rows in all futures. It includes this future from the
    sending of its request until a caller takes the result or drops the future. A wait for the
    future, with any function of `concurrent.futures` or `asyncio`, sets `is_awaited`.

    Lock order: first the condition of a future, then the lock of the window; never in reverse.
    """

    def __init__(self, window: Window, query: ScoreQuery) -> None:
        super().__init__()
        self._window = window
        self.counted_bytes = 0  # bytes counted against the prefetch limit now
        self.is_awaited = False
        self.failures: Counter[str] = Counter()  # by teacher: the failed tries of this request
        self._waiters = _Waiters(self)
        self.dropped = False
        self.query = query
        self.assembly = RowAssembly(query)
        self.size = answer_bytes(query) + _ENTRY_BYTES

    def want(self) -> None:
        """Record that a caller waits for the answer."""
        self._window.want(self)

    def add_done_callback(self, fn: Callable[[Future[RowBlock]], object]) -> None:
        """Add a callback as Future does.

        The future is then awaited, as for `asyncio.wrap_future`.
        """
        self.want()
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Cancel the future as Future does, and record whether it was cancelled."""
        self.dropped = super().cancel()
        return self.dropped

    def result(self, timeout: float | None = None) -> RowBlock:
        """Return the rows as Future does. The prefetch limit then no longer includes the rows."""
        self._window.want(self)
        try:
            return super().result(timeout)
        finally:
            self._release_if_done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error as Future does. The prefetch limit then no longer includes the rows."""
        self._window.want(self)
        try:
            return super().exception(timeout)
        finally:
            self._release_if_done()

    def release(self) -> None:
        """Remove the rows from the prefetch limit.

        A caller has taken the rows, or has dropped the future.
        """
        self._window.release(self)

    def _release_if_done(self) -> None:
        if self.done():
            self.release()

    def __del__(self) -> None:
        self.release()
