"""Unfinished requests of a teacher client: the queue, the streams, and the prefetch limit."""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from clients.teacher.query import ScoreQuery, answer_bytes, request_of
from clients.teacher.row_assembly import ScoreAssembly
from protos import teacher_pb2
from protos.errors import (
    Corrupt,
    DistillError,
    InternalFault,
    Overloaded,
    Unavailable,
    error_of,
)
from protos.rows.codec import RowBlock

_PAUSE_SECONDS = 0.5  # least pause before a request goes to an overloaded teacher again
# A request that a teacher fails with one of these errors is sent again, to another teacher if there
# is one, and fails after this many tries at each teacher.
_NOT_THE_QUERY = (InternalFault, Unavailable)
MAX_TRIES = 3
_ENTRY_BYTES = 2048  # estimated memory of a request and its future, rows excluded


class _Waiters(list[Any]):
    """The waiters of a future: `concurrent.futures.wait` and `as_completed` add themselves.

    Whoever waits wants the answer, as if `result` were called.
    """

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self._answer = weakref.ref(answer)

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        answer = self._answer()
        if answer is not None:
            answer.want()


class _Answer(Future[RowBlock]):
    """The future of one query.

    Its rows count against the prefetch limit from the time the request is sent until a caller
    takes the result or drops the future. A caller that waits for it, in any way that
    `concurrent.futures` or `asyncio` has, makes it wanted.

    Lock order: the condition of a future may be held when the lock of the window is taken, never
    the other way round.
    """

    def __init__(self, window: ScoreWindow, query: ScoreQuery) -> None:
        super().__init__()
        self._window = window
        self.held = 0  # bytes it takes of the prefetch limit now
        self.wanted = False
        self.failures: Counter[str] = Counter()  # by teacher: the failed tries of this request
        self._waiters = _Waiters(self)
        self.dropped = False
        self.query = query
        self.assembly = ScoreAssembly(query)
        self.size = answer_bytes(query) + _ENTRY_BYTES

    def want(self) -> None:
        """Say that a caller waits for the answer."""
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
        self._window.want(self)
        try:
            return super().result(timeout)
        finally:
            self._release_if_done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._window.want(self)
        try:
            return super().exception(timeout)
        finally:
            self._release_if_done()

    def release(self) -> None:
        """Stop counting its rows: the caller has taken them, or nobody will."""
        self._window.release(self)

    def _release_if_done(self) -> None:
        if self.done():
            self.release()

    def __del__(self) -> None:
        self.release()


class ScoreWindow:
    """The queue of requests, shared by the caller's threads and the streams of all teachers.

    Every method is thread-safe. At most `max_requests` are in flight on one stream. The answers
    that are in flight, or received and not yet taken, have at most `max_bytes`. A request that a
    caller waits for is sent regardless of `max_bytes`.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        # Two conditions on one lock, so that messages do not wake the watchdog.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._owing = threading.Condition(lock)
        self._waiting: deque[_Answer] = deque()
        self._streams: list[WindowStream] = []
        self._held_bytes = 0
        self._ids = itertools.count()
        self.closed = False
        # Monotonic time of the last message, or of the time when an answer first became due.
        self.silent_since = time.monotonic()

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that are in flight, or received and not yet taken."""
        return self._held_bytes

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Queue a query and return its future. Raises Unavailable if the window is closed."""
        answer = _Answer(self, query)
        with self._changed:
            if self.closed:
                raise Unavailable("this teacher client is closed", hint="make a new TeacherClient")
            self._before_more()
            self._waiting.append(answer)
            self._changed.notify_all()
        return answer

    def open(self, teacher: str = "") -> WindowStream:
        """Register a stream to `teacher`, which takes requests from the queue until its `end`."""
        with self._changed:
            stream = WindowStream(self, teacher)
            self._streams.append(stream)
            return stream

    def want(self, answer: _Answer) -> None:
        """Move a request to the front of the queue, because a caller waits for it."""
        with self._changed:
            answer.wanted = True
            # A request that is in flight, or was, is in front already.
            if not answer.held and answer in self._waiting:
                self._before_more()
                self._waiting.remove(answer)
                self._waiting.appendleft(answer)
                self._changed.notify_all()

    def release(self, answer: _Answer) -> None:
        """Stop counting the rows of `answer` against the prefetch limit."""
        if not answer.held:
            return
        with self._changed:
            self._before_more()
            self._held_bytes -= answer.held
            answer.held = 0
            self._wake_senders()

    def wait_for_work(self) -> bool:
        """Block until there is an unfinished request; return False if the window is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._unfinished())
            return not self.closed

    def wait_closed(self, seconds: float) -> bool:
        """Sleep for `seconds`, or until the window is closed; return True if it is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed, seconds)

    def wait_for_stall(self, seconds: float, not_before: float) -> bool:
        """Block until no message has arrived for `seconds` although an answer is due.

        The silence counts from `not_before` (monotonic clock) at the earliest. Returns False once
        the window is closed.
        """
        with self._changed:
            while not self.closed:
                if not self._owed():
                    self._owing.wait()
                    continue
                left = max(self.silent_since, not_before) + seconds - time.monotonic()
                if left <= 0:
                    return True
                self._owing.wait(left)
            return False

    def ask_again(self) -> None:
        """Discard the rows of all unfinished requests and request them again on new streams."""
        with self._changed:
            for stream in self._streams:
                stream.retire()
            for answer in self._waiting:
                answer.assembly.restart()
            self._changed.notify_all()

    def fail_all(self, fault: DistillError) -> None:
        """Fail every unfinished request with `fault`; requests submitted later are not affected."""
        for answer in self._take_all():
            _resolve(answer, fault)

    def close(self) -> None:
        """Cancel every unfinished request and accept no more."""
        with self._changed:
            self.closed = True
            self._owing.notify_all()
        for answer in self._take_all():
            answer.cancel()

    def _before_more(self) -> None:
        """Call before a change that may make an answer due: starts the clock if none was due."""
        if not self._owed():
            self.silent_since = time.monotonic()
            self._owing.notify_all()

    def _wake_senders(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _unfinished(self) -> bool:
        return bool(self._waiting) or any(stream.sent for stream in self._streams)

    def _owed(self) -> bool:
        """True if an answer of a teacher is due. One held back by the limit is not due."""
        return any(stream.sent for stream in self._streams) or self._first() is not None

    def _first(self, teacher: str | None = None) -> _Answer | None:
        """Return the next request to send, the oldest one, or None if the limit forbids it.

        With `teacher`, requests are passed over that another connected teacher failed less often.
        """
        while self._waiting and self._waiting[0].dropped:
            self._waiting.popleft()
        for answer in self._waiting:
            if teacher is None or answer.failures[teacher] <= self._fewest_failures(answer):
                break
        else:
            return None
        fits = self._held_bytes + answer.size <= self._max_bytes
        # A request larger than the limit is sent when nothing else is held.
        return answer if fits or answer.held or answer.wanted or not self._held_bytes else None

    def _fewest_failures(self, answer: _Answer) -> int:
        if not answer.failures:
            return 0
        return min((answer.failures[stream.teacher] for stream in self._streams), default=0)

    def _take_all(self) -> list[_Answer]:
        with self._changed:
            taken = [*(a for s in self._streams for a in s.sent.values()), *self._waiting]
            for stream in self._streams:
                stream.sent.clear()
            self._waiting.clear()
            self._changed.notify_all()
            return taken


class WindowStream:
    """The requests in flight on one stream.

    A request gets a new wire id each time it is sent, so that late chunks of an abandoned answer
    are recognised and ignored.
    """

    def __init__(self, window: ScoreWindow, teacher: str) -> None:
        self.teacher = teacher
        self._window = window
        self._changed = window._changed
        self._idle = False  # its sender waits for a request
        self._paused_until = 0.0
        self._ended = False
        self.sent: OrderedDict[str, _Answer] = OrderedDict()

    def requests(self) -> Iterator[teacher_pb2.ScoreRequest]:
        """Yield the messages to send, as the window allows, until `end` or the window's `close`."""
        while (request := self._next_request()) is not None:
            yield request

    def _next_request(self) -> teacher_pb2.ScoreRequest | None:
        # A separate function: the frame of a generator would keep the answer and its rows alive
        # until the next request.
        taken = self._take()
        if taken is None:
            return None
        wire_id, answer = taken
        return request_of(answer.query, wire_id, answer.assembly.resume_position)

    def _take(self) -> tuple[str, _Answer] | None:
        window = self._window
        with self._changed:
            while not (self._ended or window.closed):
                pause = self._paused_until - time.monotonic()
                answer = window._first(self.teacher) if pause <= 0 else None
                if answer is not None and self._is_next(answer):
                    window._waiting.remove(answer)
                    window._held_bytes += answer.size - answer.held
                    answer.held = answer.size
                    wire_id = str(next(window._ids))
                    self.sent[wire_id] = answer
                    if len(window._streams) > 1:
                        window._wake_senders()  # another stream may be next
                    return wire_id, answer
                self._idle = pause <= 0
                self._changed.wait(pause if pause > 0 else None)
                self._idle = False
            return None

    def _is_next(self, answer: _Answer) -> bool:
        """True if this stream has room, and no idle stream that may take it has fewer in flight."""
        most, fewest = self._window._max_requests, self._window._fewest_failures(answer)
        idle = (s for s in self._window._streams if s._idle)
        least = min(
            (len(s.sent) for s in idle if answer.failures[s.teacher] <= fewest), default=most
        )
        return len(self.sent) < most and len(self.sent) <= least

    def receive(self, chunk: teacher_pb2.ScoreChunk) -> None:
        """Process one chunk, and resolve the future that it completes."""
        with self._changed:
            answer = self.sent.get(chunk.request_id)
            outcome = self._outcome(chunk, answer) if answer else None
            if outcome is not None:
                del self.sent[chunk.request_id]
            self._window._wake_senders()
        # Outside the lock: callbacks of a future may submit the next query.
        if answer is not None and outcome is not None:
            _resolve(answer, outcome)

    def end(self) -> None:
        """Unregister the stream and requeue its requests, oldest first, with the rows they have."""
        with self._changed:
            self.retire()
            self._window._streams.remove(self)
            self._changed.notify_all()

    def retire(self) -> None:
        """Requeue the requests, send no more and ignore further chunks. The lock must be held."""
        self._ended = True
        self._window._waiting.extendleft(reversed(self.sent.values()))
        self.sent.clear()

    def _outcome(
        self, chunk: teacher_pb2.ScoreChunk, answer: _Answer
    ) -> RowBlock | DistillError | None:
        """Return the rows or the error that ends the request, or None if more chunks follow."""
        if chunk.HasField("error"):
            error = chunk.error
            fault = error_of(error.code, error.message, field=error.field, hint=error.hint)
            if isinstance(fault, _NOT_THE_QUERY):
                answer.failures[self.teacher] += 1
                if self._window._fewest_failures(answer) >= MAX_TRIES:
                    return fault
                self._send_again(chunk.request_id)
                return None
            if not isinstance(fault, Overloaded):
                return fault
            # `silent_since` is not updated: a teacher that stays overloaded counts as silent.
            pause = max(_PAUSE_SECONDS, error.retry_after_ms / 1000)
            self._paused_until = time.monotonic() + pause * random.uniform(1, 1.5)
            self._send_again(chunk.request_id)
            return None
        self._window.silent_since = time.monotonic()
        if not answer.assembly.continues(chunk):
            # The teacher scored the sequence again: never mix the rows of two scorings.
            answer.assembly.restart()
            self._send_again(chunk.request_id)
            return None
        try:
            return answer.assembly.add(chunk)
        except Corrupt as corrupt:
            return corrupt

    def _send_again(self, wire_id: str) -> None:
        self._window._waiting.appendleft(self.sent.pop(wire_id))


def _resolve(answer: _Answer, outcome: RowBlock | DistillError) -> None:
    running = answer.set_running_or_notify_cancel()
    if running and isinstance(outcome, RowBlock):
        answer.set_result(outcome)
        return
    answer.release()
    if running and not isinstance(outcome, RowBlock):
        answer.set_exception(outcome)
