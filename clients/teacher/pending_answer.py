"""The future of one query; waiting for it in any way sends its request."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from clients.teacher.query import ScoreQuery, answer_bytes
from clients.teacher.row_assembly import RowAssembly
from protos.rows.codec import RowBlock

_ENTRY_BYTES = 2048  # estimated memory of a request and its future, rows excluded


class Window(Protocol):
    """The queue that holds an answer, see PendingRequests."""

    def want(self, answer: PendingAnswer) -> None:
        """Send the request regardless of the prefetch limit, because a caller waits."""
        ...

    def release(self, answer: PendingAnswer) -> None:
        """Stop counting the rows of `answer` against the prefetch limit."""
        ...


class _Waiters(list[Any]):
    """The waiters of a future: `concurrent.futures.wait` and `as_completed` add themselves.

    A waiter is handled as a caller of `result`.
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

    Its rows count against the prefetch limit from the time the request is sent until a caller
    takes the result or drops the future. A caller that waits for it, in any way that
    `concurrent.futures` or `asyncio` has, sets `is_awaited`.

    Lock order: the condition of a future may be held when the lock of the window is taken, never
    the other way round.
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
        """Register that a caller waits for the answer."""
        self._window.want(self)

    def add_done_callback(self, fn: Callable[[Future[RowBlock]], object]) -> None:
        """As in Future; `asyncio.wrap_future` waits by a callback."""
        self.want()
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """As in Future."""
        self.dropped = super().cancel()
        return self.dropped

    def result(self, timeout: float | None = None) -> RowBlock:
        """As in Future; the caller then holds the rows, and they stop counting."""
        self._window.want(self)
        try:
            return super().result(timeout)
        finally:
            self._release_if_done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As in Future; the rows stop counting once the answer is there."""
        self._window.want(self)
        try:
            return super().exception(timeout)
        finally:
            self._release_if_done()

    def release(self) -> None:
        """Stop counting its rows: the caller has taken them, or has dropped the future."""
        self._window.release(self)

    def _release_if_done(self) -> None:
        if self.done():
            self.release()

    def __del__(self) -> None:
        self.release()
