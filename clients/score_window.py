"""The requests of a teacher client that have no answer yet: what waits, what is on the wire, since
when.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from clients.score_assembly import ScoreAssembly
from clients.score_query import ScoreQuery, request_of
from protos import teacher_pb2
from protos.errors import Corrupt, DistillError, Overloaded, Unavailable, error_of
from protos.rows import RowBlock

_PAUSE_SECONDS = 0.5  # of an overloaded teacher, before its request is sent again


@dataclass(eq=False)
class _Pending:
    query: ScoreQuery
    assembly: ScoreAssembly
    future: Future[RowBlock] = field(default_factory=Future)


class ScoreWindow:
    """Shared by the caller's threads, the stream's reader and its writer; every method may be
    called by any.

    At most `size` requests are on the wire. A request gets a new wire id each time it is sent, so
    that what is left of an abandoned answer is recognised and ignored.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._waiting: deque[_Pending] = deque()
        self._sent: OrderedDict[str, _Pending] = OrderedDict()
        self._ids = itertools.count()
        self._paused_until = 0.0
        self._generation = 0
        self.closed = False
        self.last_progress = time.monotonic()

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Queue a query. Its future fails with Unavailable once the window is closed."""
        pending = _Pending(query, ScoreAssembly(query))
        with self._changed:
            if self.closed:
                raise Unavailable("this teacher client is closed")
            if not self._waiting and not self._sent:
                self.last_progress = time.monotonic()
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending.future

    def wait_for_work(self) -> bool:
        """Block until something is asked; False once the window is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._waiting or self._sent)
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
                if not self._waiting and not self._sent:
                    self._changed.wait()
                    continue
                left = max(self.last_progress, not_before) + seconds - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def requests(self) -> Iterator[teacher_pb2.ScoreRequest]:
        """What one stream sends, as the window allows; ends with `reconnect` or `close`."""
        # Taken now, not at the first `next`: the writer of a dead stream must find itself outdated.
        return self._requests_of(self._generation)

    def _requests_of(self, generation: int) -> Iterator[teacher_pb2.ScoreRequest]:
        while (taken := self._take_one(generation)) is not None:
            wire_id, pending = taken
            yield request_of(pending.query, wire_id, pending.assembly.resume_position)

    def _take_one(self, generation: int) -> tuple[str, _Pending] | None:
        with self._changed:
            while generation == self._generation and not self.closed:
                pause = self._paused_until - time.monotonic()
                if pause > 0:
                    self._changed.wait(pause)
                elif not self._waiting or len(self._sent) >= self._size:
                    self._changed.wait()
                elif not (pending := self._waiting.popleft()).future.cancelled():
                    wire_id = str(next(self._ids))
                    self._sent[wire_id] = pending
                    return wire_id, pending
            return None

    def reconnect(self) -> None:
        """The stream is gone: what it carried waits again, oldest first, and keeps its rows."""
        with self._changed:
            self._generation += 1
            self._waiting.extendleft(reversed(self._sent.values()))
            self._sent.clear()
            self._changed.notify_all()

    def receive(self, chunk: teacher_pb2.ScoreChunk) -> None:
        """Take one answer; a future that it completes is resolved here."""
        with self._changed:
            pending = self._sent.get(chunk.request_id)
            outcome = self._outcome(chunk, pending) if pending else None
            if outcome is not None:
                del self._sent[chunk.request_id]
            self._changed.notify_all()
        # Outside the lock: callbacks of a future may submit the next query.
        if pending is not None and outcome is not None:
            _resolve(pending.future, outcome)

    def fail_all(self, fault: DistillError) -> None:
        """Every request fails with the same fault; later ones start anew."""
        for pending in self._take_all():
            _resolve(pending.future, fault)

    def close(self) -> None:
        """Cancel every request and let no more in."""
        with self._changed:
            self.closed = True
        for pending in self._take_all():
            pending.future.cancel()

    def _take_all(self) -> list[_Pending]:
        with self._changed:
            taken = [*self._sent.values(), *self._waiting]
            self._sent.clear()
            self._waiting.clear()
            self._changed.notify_all()
            return taken

    def _outcome(
        self, chunk: teacher_pb2.ScoreChunk, pending: _Pending
    ) -> RowBlock | DistillError | None:
        """How the request ends, or None when more is to come."""
        if chunk.HasField("error"):
            error = chunk.error
            fault = error_of(error.code, error.message, field=error.field, hint=error.hint)
            if not isinstance(fault, Overloaded):
                return fault
            # Not progress: a teacher that is always overloaded is given up in the end.
            self._paused_until = time.monotonic() + _PAUSE_SECONDS * random.uniform(0.5, 1.5)
            self._send_again(chunk.request_id)
            return None
        self.last_progress = time.monotonic()
        if not pending.assembly.continues(chunk):
            # The teacher scored the sequence anew: two scorings are never mixed.
            pending.assembly.restart()
            self._send_again(chunk.request_id)
            return None
        try:
            return pending.assembly.add(chunk)
        except Corrupt as corrupt:
            return corrupt

    def _send_again(self, wire_id: str) -> None:
        self._waiting.appendleft(self._sent.pop(wire_id))


def _resolve(future: Future[RowBlock], outcome: RowBlock | DistillError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, RowBlock):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
