"""The requests of a teacher client that have no answer yet: what waits, what is on which wire, and
how much memory their answers may take.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future

from clients.teacher.query import ScoreQuery, answer_bytes, request_of
from clients.teacher.row_assembly import ScoreAssembly
from protos import teacher_pb2
from protos.errors import Corrupt, DistillError, Overloaded, Unavailable, error_of
from protos.rows.codec import RowBlock

_PAUSE_SECONDS = 0.5  # of an overloaded teacher, before its request is sent again
_ENTRY_BYTES = 2048  # of a request and its answer besides the rows


class _Answer(Future[RowBlock]):
    """Its rows count as prefetched from the sending until a caller takes them, or drops this."""

    def __init__(self, window: ScoreWindow, query: ScoreQuery) -> None:
        super().__init__()
        self._window = window
        self.held = 0  # bytes of the limit that it takes now
        self.wanted = False
        self.query = query
        self.assembly = ScoreAssembly(query)
        self.size = answer_bytes(query) + _ENTRY_BYTES

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
        """Its rows are the caller's now, or nobody's."""
        self._window.release(self)

    def _release_if_done(self) -> None:
        if self.done():
            self.release()

    def __del__(self) -> None:
        self.release()


class ScoreWindow:
    """Shared by the caller's threads and the streams of all teachers; every method may be called by
    any.

    At most `max_requests` are on one wire, and all answers that are on their way, or there and not
    yet taken, have at most `max_bytes`. What a caller waits for is never prefetched: it is sent
    whatever there is already.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        # One lock, two rooms to wait in: no message wakes the watcher.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._owing = threading.Condition(lock)
        self._waiting: deque[_Answer] = deque()
        self._streams: list[WindowStream] = []
        self._held_bytes = 0
        self._ids = itertools.count()
        self.closed = False
        # Since when the teachers owe an answer and have sent nothing, on the monotonic clock.
        self.silent_since = time.monotonic()

    @property
    def held_bytes(self) -> int:
        """Of answers on their way, or there and not yet taken."""
        return self._held_bytes

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Queue a query. Its future fails with Unavailable once the window is closed."""
        answer = _Answer(self, query)
        with self._changed:
            if self.closed:
                raise Unavailable("this teacher client is closed")
            self._before_more()
            self._waiting.append(answer)
            self._changed.notify_all()
        return answer

    def open(self) -> WindowStream:
        """A share of the work for one stream."""
        with self._changed:
            stream = WindowStream(self)
            self._streams.append(stream)
            return stream

    def want(self, answer: _Answer) -> None:
        """Somebody waits for it: it goes first."""
        with self._changed:
            answer.wanted = True
            # Who is on a wire, or was, is first already.
            if not answer.held and answer in self._waiting:
                self._before_more()
                self._waiting.remove(answer)
                self._waiting.appendleft(answer)
                self._changed.notify_all()

    def release(self, answer: _Answer) -> None:
        """It counts no longer."""
        if not answer.held:
            return
        with self._changed:
            self._before_more()
            self._held_bytes -= answer.held
            answer.held = 0
            self._wake_senders()

    def wait_for_work(self) -> bool:
        """Block until something is asked; False once the window is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._unfinished())
            return not self.closed

    def wait_closed(self, seconds: float) -> bool:
        """Sleep, unless the window is closed meanwhile."""
        with self._changed:
            return self._changed.wait_for(lambda: self.closed, seconds)

    def wait_for_stall(self, seconds: float, not_before: float) -> bool:
        """Block until nothing came for so long, counted from `not_before` (monotonic) at the
        earliest, although something is asked; False once closed.
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
        """Rows of what is unfinished are forgotten, and asked for anew, on new streams."""
        with self._changed:
            for stream in self._streams:
                stream.retire()
            for answer in self._waiting:
                answer.assembly.restart()
            self._changed.notify_all()

    def fail_all(self, fault: DistillError) -> None:
        """Every request fails with the same fault; later ones start anew."""
        for answer in self._take_all():
            _resolve(answer, fault)

    def close(self) -> None:
        """Cancel every request and let no more in."""
        with self._changed:
            self.closed = True
            self._owing.notify_all()
        for answer in self._take_all():
            answer.cancel()

    def _before_more(self) -> None:
        """Something may be owed from now on: if nothing was, its time begins."""
        if not self._owed():
            self.silent_since = time.monotonic()
            self._owing.notify_all()

    def _wake_senders(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _unfinished(self) -> bool:
        return bool(self._waiting) or any(stream.sent for stream in self._streams)

    def _owed(self) -> bool:
        """Whether the teachers keep somebody waiting; not so when the limit does."""
        return any(stream.sent for stream in self._streams) or self._first() is not None

    def _first(self) -> _Answer | None:
        """The next to be sent: the oldest, while the limit allows it."""
        while self._waiting and self._waiting[0].cancelled():
            self._waiting.popleft()
        if not self._waiting:
            return None
        answer = self._waiting[0]
        fits = self._held_bytes + answer.size <= self._max_bytes
        # One that is larger than the limit goes alone.
        return answer if fits or answer.held or answer.wanted or not self._held_bytes else None

    def _take_all(self) -> list[_Answer]:
        with self._changed:
            taken = [*(a for s in self._streams for a in s.sent.values()), *self._waiting]
            for stream in self._streams:
                stream.sent.clear()
            self._waiting.clear()
            self._changed.notify_all()
            return taken


class WindowStream:
    """What one stream carries. A request gets a new wire id each time it is sent, so that what is
    left of an abandoned answer is recognised and ignored.
    """

    def __init__(self, window: ScoreWindow) -> None:
        self._window = window
        self._changed = window._changed
        self._idle = False  # its writer waits for something to send
        self._paused_until = 0.0
        self._ended = False
        self.sent: OrderedDict[str, _Answer] = OrderedDict()

    def requests(self) -> Iterator[teacher_pb2.ScoreRequest]:
        """What the stream sends, as the window allows; ends with `end` or the window's `close`."""
        while (request := self._next_request()) is not None:
            yield request

    def _next_request(self) -> teacher_pb2.ScoreRequest | None:
        # Not in the generator: its frame would hold the answer, and its rows, until the next one.
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
                answer = window._first() if pause <= 0 and self._is_next() else None
                if answer is not None:
                    window._waiting.popleft()
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

    def _is_next(self) -> bool:
        """Whether it may carry more, and no teacher with less to do waits for work."""
        most = self._window._max_requests
        least = min((len(s.sent) for s in self._window._streams if s._idle), default=most)
        return len(self.sent) < most and len(self.sent) <= least

    def receive(self, chunk: teacher_pb2.ScoreChunk) -> None:
        """Take one message; a future that it completes is resolved here."""
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
        """The stream is gone: what it carried waits again, oldest first, and keeps its rows."""
        with self._changed:
            self.retire()
            self._window._streams.remove(self)
            self._changed.notify_all()

    def retire(self) -> None:
        """With the lock: what it carried waits again; it sends no more, and is not listened to."""
        self._ended = True
        self._window._waiting.extendleft(reversed(self.sent.values()))
        self.sent.clear()

    def _outcome(
        self, chunk: teacher_pb2.ScoreChunk, answer: _Answer
    ) -> RowBlock | DistillError | None:
        """How the request ends, or None when more is to come."""
        if chunk.HasField("error"):
            error = chunk.error
            fault = error_of(error.code, error.message, field=error.field, hint=error.hint)
            if not isinstance(fault, Overloaded):
                return fault
            # Not progress: a teacher that is always overloaded is given up in the end.
            pause = max(_PAUSE_SECONDS, error.retry_after_ms / 1000)
            self._paused_until = time.monotonic() + pause * random.uniform(1, 1.5)
            self._send_again(chunk.request_id)
            return None
        self._window.silent_since = time.monotonic()
        if not answer.assembly.continues(chunk):
            # The teacher scored the sequence anew: two scorings are never mixed.
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
