"""The unfinished requests of a teacher client: their queue, streams and prefetch limit."""

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

_PAUSE_SECONDS = 0.5  # minimum pause before a request is sent to an overloaded teacher again
# A request that fails with one of these errors of a teacher is sent again, to another teacher if
# there is one, and fails after MAX_TRIES at each teacher.
_TEACHER_FAULTS = (InternalFault, Unavailable)
MAX_TRIES = 3


class PendingRequests:
    """The queue of requests. The threads of the caller and the streams of all teachers share it.

    Every method is thread-safe. A stream sends at most `max_requests` requests before their
    answers. The answers that were requested and not yet taken by a caller have at most `max_bytes`
    in total. A request for which a caller waits is sent even above `max_bytes`.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        # Two conditions on one lock, so that messages do not wake the watchdog.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._answer_due = threading.Condition(lock)
        self._waiting: deque[PendingAnswer] = deque()
        self._streams: list[RequestStream] = []
        self._held_bytes = 0
        self._ids = itertools.count()
        self.closed = False
        # Monotonic time of the last message, or of the time when an answer first became due.
        self.silent_since = time.monotonic()

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the answers that were requested and not yet taken by a caller."""
        return self._held_bytes

    def silence_seconds(self) -> float:
        """Return the seconds since the last message while `_is_answer_due`, otherwise 0."""
        with self._changed:
            return time.monotonic() - self.silent_since if self._is_answer_due() else 0.0

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Queue a query and return its future. Raises Unavailable after `close`."""
        answer = PendingAnswer(self, query)
        with self._changed:
            if self.closed:
                raise Unavailable("this teacher client is closed", hint="make a new TeacherClient")
            self._start_silence_clock()
            self._waiting.append(answer)
            self._changed.notify_all()
        return answer

    def open(
        self,
        teacher: str = "",
        max_request_bytes: int = MAX_REQUEST_BYTES,
        vocab_size: int = 1 << 31,
    ) -> RequestStream:
        """Register a new stream to `teacher`, and return it. It takes requests until its `end`.

        - `max_request_bytes`: a larger request fails with InvalidInput
        - `vocab_size`: number of the teacher's logits; all ids in its rows must be smaller
        """
        with self._changed:
            stream = RequestStream(self, teacher, max_request_bytes, vocab_size)
            self._streams.append(stream)
            return stream

    def want(self, answer: PendingAnswer) -> None:
        """Move a request to the front of the queue, because a caller waits for it."""
        with self._changed:
            answer.is_awaited = True
            # Requests that are or were in flight are already at the front.
            if not answer.counted_bytes and answer in self._waiting:
                self._start_silence_clock()
                self._waiting.remove(answer)
                self._waiting.appendleft(answer)
                self._changed.notify_all()

    def release(self, answer: PendingAnswer) -> None:
        """Exclude the rows of `answer` from the bytes that the prefetch limit bounds."""
        if not answer.counted_bytes:
            return
        with self._changed:
            self._start_silence_clock()
            self._held_bytes -= answer.counted_bytes
            answer.counted_bytes = 0
            self._wake_senders()

    def wait_for_work(self) -> bool:
        """Wait until there is an unfinished request, and return True.

        Return False after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._has_unfinished())
            return not self.closed

    def wait_closed(self, seconds: float) -> bool:
        """Wait for `seconds` and return False. Return True after `close`, at once."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed, seconds)

    def wait_for_stall(self, seconds: float, not_before: float) -> bool:
        """Wait until the teachers have sent no message for `seconds` while `_is_answer_due`.

        The seconds start at `not_before` (monotonic clock) or later. Returns True for such a stall,
        and False after `close`.
        """
        with self._changed:
            while not self.closed:
                if not self._is_answer_due():
                    self._answer_due.wait()
                    continue
                remaining_seconds = max(self.silent_since, not_before) + seconds - time.monotonic()
                if remaining_seconds <= 0:
                    return True
                self._answer_due.wait(remaining_seconds)
            return False

    def rescore_all(self) -> None:
        """Discard the rows of all unfinished requests, and send them again on new streams."""
        with self._changed:
            for stream in self._streams:
                stream.retire()
            for answer in self._waiting:
                answer.assembly.restart()
            self._changed.notify_all()

    def fail_all(self, fault: DistillError) -> None:
        """Fail every unfinished request with `fault`. Later requests are not affected."""
        for answer in self._take_all():
            _resolve_future(answer, fault)

    def close(self) -> None:
        """Cancel every unfinished request. Later calls of `submit` raise Unavailable."""
        with self._changed:
            self.closed = True
            self._answer_due.notify_all()
        for answer in self._take_all():
            answer.cancel()

    def _start_silence_clock(self) -> None:
        """Set the start of the silence to now, unless a teacher already has a request to answer.

        Call this before a change after which a teacher has a request to answer.
        """
        if not self._is_answer_due():
            self.silent_since = time.monotonic()
            self._answer_due.notify_all()

    def _wake_senders(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _has_unfinished(self) -> bool:
        return bool(self._waiting) or any(stream.in_flight for stream in self._streams)

    def _is_answer_due(self) -> bool:
        """Return whether a teacher has a request to answer, or could get one now.

        A request that waits only because of the prefetch limit gives False.
        """
        return any(stream.in_flight for stream in self._streams) or self._next_answer() is not None

    def _next_answer(self, teacher: str | None = None) -> PendingAnswer | None:
        """Return the oldest request that may be sent; None if there is none, or if the limit is
        reached.

        `teacher`: name of the teacher to send to; None: any teacher. A request that has failed at
        this teacher more often than at another connected teacher is left to that other teacher.
        """
        while self._waiting and self._waiting[0].dropped:
            self._waiting.popleft()
        for answer in self._waiting:
            if teacher is None or answer.failures[teacher] <= self._fewest_failures(answer):
                break
        else:
            return None
        is_within_limit = self._held_bytes + answer.size <= self._max_bytes
        # A request larger than the limit is sent when nothing else is held.
        return (
            answer
            if is_within_limit or answer.counted_bytes or answer.is_awaited or not self._held_bytes
            else None
        )

    def _fewest_failures(self, answer: PendingAnswer) -> int:
        if not answer.failures:
            return 0
        return min((answer.failures[stream.teacher] for stream in self._streams), default=0)

    def _take_all(self) -> list[PendingAnswer]:
        with self._changed:
            answers = [
                *(
                    answer
                    for request_stream in self._streams
                    for answer in request_stream.in_flight.values()
                ),
                *self._waiting,
            ]
            for stream in self._streams:
                stream.in_flight.clear()
            self._waiting.clear()
            self._changed.notify_all()
            return answers


class RequestStream:
    """The requests on one stream that are not answered yet.

    Each time a request is sent, it gets a new id. Late chunks for an earlier id can therefore be
    ignored.
    """

    def __init__(
        self, window: PendingRequests, teacher: str, max_request_bytes: int, vocab_size: int
    ) -> None:
        self.teacher = teacher
        self._max_request_bytes = max_request_bytes
        self._vocab_size = vocab_size
        self._window = window
        self._changed = window._changed
        self._idle = False  # the sender of the stream waits for a request
        self._paused_until = 0.0
        self._ended = False
        self.in_flight: OrderedDict[str, PendingAnswer] = OrderedDict()

    def requests(self) -> Iterator[teacher_pb2.ScoreRequest]:
        """Yield the messages to send, within the limits, until `end` or the queue is closed."""
        while (messages := self._next_request()) is not None:
            yield from messages

    def _next_request(self) -> Iterator[teacher_pb2.ScoreRequest] | None:
        # A separate function: the frame of a generator would keep the answer and its rows alive
        # until the next request.
        while (id_and_answer := self._take_next()) is not None:
            wire_id, answer = id_and_answer
            size = answer.query.nbytes + REQUEST_ENVELOPE_BYTES
            if size <= self._max_request_bytes:
                return requests_of(answer.query, wire_id, answer.assembly.resume_position)
            with self._changed:
                self.in_flight.pop(wire_id, None)
            _resolve_future(answer, _too_large_error(size, self._max_request_bytes, self.teacher))
        return None

    def _take_next(self) -> tuple[str, PendingAnswer] | None:
        window = self._window
        with self._changed:
            while not (self._ended or window.closed):
                pause = self._paused_until - time.monotonic()
                answer = window._next_answer(self.teacher) if pause <= 0 else None
                if answer is not None and self._is_next(answer):
                    window._waiting.remove(answer)
                    window._held_bytes += answer.size - answer.counted_bytes
                    answer.counted_bytes = answer.size
                    wire_id = str(next(window._ids))
                    self.in_flight[wire_id] = answer
                    if len(window._streams) > 1:
                        window._wake_senders()  # another stream may be next
                    return wire_id, answer
                self._idle = pause <= 0
                self._changed.wait(pause if pause > 0 else None)
                self._idle = False
            return None

    def _is_next(self, answer: PendingAnswer) -> bool:
        """Return whether this stream should send the request of `answer`.

        The stream must have room. No other stream that waits for a request and is suitable for this
        request may have fewer requests in flight.
        """
        max_requests, fewest_failures = (
            self._window._max_requests,
            self._window._fewest_failures(answer),
        )
        idle_streams = (stream for stream in self._window._streams if stream._idle)
        fewest_in_flight = min(
            (
                len(stream.in_flight)
                for stream in idle_streams
                if answer.failures[stream.teacher] <= fewest_failures
            ),
            default=max_requests,
        )
        return len(self.in_flight) < max_requests and len(self.in_flight) <= fewest_in_flight

    def receive(self, chunk: teacher_pb2.ScoreChunk) -> None:
        """Process one chunk.

        If the answer is now complete or has failed, set the result of its future.
        """
        with self._changed:
            answer = self.in_flight.get(chunk.request_id)
            outcome = self._outcome_of(chunk, answer) if answer else None
            if outcome is not None:
                del self.in_flight[chunk.request_id]
            self._window._wake_senders()
        # Outside the lock: callbacks of a future may submit the next query.
        if answer is not None and outcome is not None:
            _resolve_future(answer, outcome)

    def end(self) -> None:
        """Remove the stream.

        Its requests return to the queue with the rows received so far, oldest first.
        """
        with self._changed:
            self.retire()
            self._window._streams.remove(self)
            self._changed.notify_all()

    def retire(self) -> None:
        """Return the requests to the queue, send no more, and ignore later chunks.

        Needs the lock.
        """
        self._ended = True
        self._window._waiting.extendleft(reversed(self.in_flight.values()))
        self.in_flight.clear()

    def _outcome_of(
        self, chunk: teacher_pb2.ScoreChunk, answer: PendingAnswer
    ) -> RowBlock | DistillError | None:
        """Add a chunk to its request. Return the result of the request, or None if more chunks
        follow.

        The result is all rows of the request, or its error.
        """
        if chunk.HasField("error"):
            error = chunk.error
            fault = error_of(error.code, error.message, field=error.field, hint=error.hint)
            if isinstance(fault, _TEACHER_FAULTS):
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
            return answer.assembly.add(chunk, self._vocab_size)
        except Corrupt as corrupt:
            return corrupt

    def _send_again(self, wire_id: str) -> None:
        self._window._waiting.appendleft(self.in_flight.pop(wire_id))


def _too_large_error(size: int, max_bytes: int, teacher: str) -> InvalidInput:
    return InvalidInput(
        f"the query has {size} bytes, but the teacher at {teacher} takes {max_bytes}",
        field="head_ids",
        hint="install this version of distill-teacher there, or use fewer head ids, or smaller"
        " images",
    )


def _resolve_future(answer: PendingAnswer, outcome: RowBlock | DistillError) -> None:
    running = answer.set_running_or_notify_cancel()
    if running and isinstance(outcome, RowBlock):
        answer.set_result(outcome)
        return
    answer.release()
    if running and not isinstance(outcome, RowBlock):
        answer.set_exception(outcome)
