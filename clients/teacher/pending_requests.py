"""Unfinished requests of a teacher client: the queue, the streams, and the prefetch limit."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future

from clients.teacher.pending_answer import PendingAnswer
from clients.teacher.query import REQUEST_ENVELOPE_BYTES, ScoreQuery, requests_of
from protos import teacher_pb2
from protos.errors import (
    Corrupt,
    DistillError,
    InternalFault,
    InvalidInput,
    Overloaded,
    Unavailable,
    error_of,
)
from protos.rows.codec import RowBlock
from protos.rpc.transport import MAX_REQUEST_BYTES

_PAUSE_SECONDS = 0.5  # least pause before a request goes to an overloaded teacher again
# A request that a teacher fails with one of these errors is sent again, to another teacher if there
# is one, and fails after this many tries at each teacher.
_NOT_THE_QUERY = (InternalFault, Unavailable)
MAX_TRIES = 3


class PendingRequests:
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
        self._waiting: deque[PendingAnswer] = deque()
        self._streams: list[RequestStream] = []
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
        answer = PendingAnswer(self, query)
        with self._changed:
            if self.closed:
                raise Unavailable("this teacher client is closed", hint="make a new TeacherClient")
            self._before_more()
            self._waiting.append(answer)
            self._changed.notify_all()
        return answer

    def open(self, teacher: str = "", max_request_bytes: int = MAX_REQUEST_BYTES) -> RequestStream:
        """Register a stream to `teacher`, which takes requests from the queue until its `end`.

        A request of more than `max_request_bytes` bytes fails with InvalidInput.
        """
        with self._changed:
            stream = RequestStream(self, teacher, max_request_bytes)
            self._streams.append(stream)
            return stream

    def want(self, answer: PendingAnswer) -> None:
        """Move a request to the front of the queue, because a caller waits for it."""
        with self._changed:
            answer.wanted = True
            # Requests that are or were in flight are already at the front.
            if not answer.held and answer in self._waiting:
                self._before_more()
                self._waiting.remove(answer)
                self._waiting.appendleft(answer)
                self._changed.notify_all()

    def release(self, answer: PendingAnswer) -> None:
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

    def _first(self, teacher: str | None = None) -> PendingAnswer | None:
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

    def _fewest_failures(self, answer: PendingAnswer) -> int:
        if not answer.failures:
            return 0
        return min((answer.failures[stream.teacher] for stream in self._streams), default=0)

    def _take_all(self) -> list[PendingAnswer]:
        with self._changed:
            taken = [*(a for s in self._streams for a in s.sent.values()), *self._waiting]
            for stream in self._streams:
                stream.sent.clear()
            self._waiting.clear()
            self._changed.notify_all()
            return taken


class RequestStream:
    """The requests in flight on one stream.

    A request gets a new wire id each time it is sent, so that late chunks of an abandoned answer
    are recognised and ignored.
    """

    def __init__(self, window: PendingRequests, teacher: str, max_request_bytes: int) -> None:
        self.teacher = teacher
        self._max_request_bytes = max_request_bytes
        self._window = window
        self._changed = window._changed
        self._idle = False  # its sender waits for a request
        self._paused_until = 0.0
        self._ended = False
        self.sent: OrderedDict[str, PendingAnswer] = OrderedDict()

    def requests(self) -> Iterator[teacher_pb2.ScoreRequest]:
        """Yield the messages to send, as the window allows, until `end` or the window's `close`."""
        while (messages := self._next_request()) is not None:
            yield from messages

    def _next_request(self) -> Iterator[teacher_pb2.ScoreRequest] | None:
        # A separate function: the frame of a generator would keep the answer and its rows alive
        # until the next request.
        while (taken := self._take()) is not None:
            wire_id, answer = taken
            size = answer.query.nbytes + REQUEST_ENVELOPE_BYTES
            if size <= self._max_request_bytes:
                return requests_of(answer.query, wire_id, answer.assembly.resume_position)
            with self._changed:
                self.sent.pop(wire_id, None)
            _resolve(answer, _too_large(size, self._max_request_bytes, self.teacher))
        return None

    def _take(self) -> tuple[str, PendingAnswer] | None:
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

    def _is_next(self, answer: PendingAnswer) -> bool:
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
        self, chunk: teacher_pb2.ScoreChunk, answer: PendingAnswer
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


def _too_large(size: int, most: int, teacher: str) -> InvalidInput:
    return InvalidInput(
        f"the query has {size} bytes, but the teacher at {teacher} takes {most}",
        field="head_ids",
        hint="install this version of distill-teacher there, or use fewer head ids, or smaller"
        " images",
    )


def _resolve(answer: PendingAnswer, outcome: RowBlock | DistillError) -> None:
    running = answer.set_running_or_notify_cancel()
    if running and isinstance(outcome, RowBlock):
        answer.set_result(outcome)
        return
    answer.release()
    if running and not isinstance(outcome, RowBlock):
        answer.set_exception(outcome)
