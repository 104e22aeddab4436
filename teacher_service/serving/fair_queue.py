"""Queries that wait for the engine, in an order that shares the engine among their senders."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from clients.teacher.query import ScoreQuery
from protos.errors import Overloaded
from protos.rows.codec import RowBlock
from teacher_service.engines.base import EngineInfo

MAX_QUEUED_BYTES = 256 << 20
_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class Scored:
    """The rows of one query, and the info of the engine with the weights that computed them."""

    block: RowBlock
    by: EngineInfo


class Sender:
    """One client's stream of queries; senders take turns, see FairQueue.

    The queries of a sender that is `last` wait until no other query waits. `in_engine`: number of
    its queries that the engine has. `asks_singly`: it had no other query beside its last one, nor
    beside the present one.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.last = last
        self.turn = 0.0  # of its newest query, in tokens
        self.in_engine = 0
        self._unanswered = 0
        self._several = False  # at the same time, since it last had none
        self.asks_singly = False

    def ask(self) -> None:
        """Note that it sends a query."""
        if self._unanswered:
            self._several, self.asks_singly = True, False
        self._unanswered += 1

    def get(self) -> None:
        """Note that it gets an answer, or has given up a query."""
        self._unanswered -= 1
        if not self._unanswered:
            self._several, self.asks_singly = False, not self._several


@dataclass(frozen=True, order=True)
class Waiting:
    """A query that waits, ordered by its turn; `answer` is cancelled if nobody wants it any more.

    `last`: of its sender. `turn`: in tokens. `number`: of its arrival. `sender`: of the query.
    """

    last: bool
    turn: float
    number: int
    sender: Sender = field(compare=False)
    query: ScoreQuery = field(compare=False)
    answer: asyncio.Future[Scored] = field(compare=False)

    @property
    def tokens(self) -> int:
        """Number of tokens of the query."""
        return len(self.query.token_ids)


class FairQueue:
    """Orders queries by start-time fair queueing, by tokens (Goyal et al. 1996).

    A query waits for those of its own sender, and for as many tokens of each other sender, not for
    all that came before it. Of senders with the same turn, as all have at first, the first to come
    is the first, and its query is computed whole, however long. Use it from one event loop; any
    thread may read `tokens`.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._arrived = 0
        self._turn = 0.0  # that the engine has reached
        self._heap: list[Waiting] = []

    @property
    def arrived(self) -> int:
        """Number of queries that have ever been added."""
        return self._arrived

    @property
    def tokens(self) -> int:
        """Number of tokens in the queries that wait."""
        return sum(one.tokens for one in tuple(self._heap) if not one.answer.done())

    def add(self, query: ScoreQuery, sender: Sender) -> Waiting:
        """Add a query. `release` it when its answer has arrived.

        Raises Overloaded if the queries take too much memory.
        """
        size = query.nbytes + _ENTRY_BYTES
        if self._bytes + size > self._max_bytes:
            raise Overloaded(
                f"the queue of this teacher is full: {self._bytes >> 20} MiB of requests",
                hint="retry in a second, or run a second teacher",
            )
        self._bytes += size
        turn = max(self._turn, sender.turn)
        sender.turn = turn + len(query.token_ids)
        sender.ask()
        self._arrived += 1
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        waiting = Waiting(sender.last, turn, self._arrived, sender, query, answer)
        heapq.heappush(self._heap, waiting)
        return waiting

    def release(self, waiting: Waiting) -> None:
        """Give back the memory of a query, answered or not."""
        self._bytes -= waiting.query.nbytes + _ENTRY_BYTES
        waiting.sender.get()

    def first(self) -> Waiting | None:
        """Return the query whose turn is next, without taking it; None if none waits."""
        while self._heap and self._heap[0].answer.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def take(self, tokens: int) -> list[Waiting]:
        """Take queries in the order of their turns until they have so many tokens.

        Takes at least one if any waits. `give_back` those that the engine does not get.
        """
        taken: list[Waiting] = []
        while self._heap and tokens > 0:
            waiting = heapq.heappop(self._heap)
            if not waiting.answer.done():
                taken.append(waiting)
                tokens -= waiting.tokens
        return taken

    def reach(self, waiting: Waiting) -> None:
        """Note that the engine computes a query that was taken. Turns of new queries follow."""
        self._turn = max(self._turn, waiting.turn)

    def give_back(self, waiting: Waiting) -> None:
        """Let a query that was taken wait again, with the turn that it had."""
        heapq.heappush(self._heap, waiting)

    def fail(self, error: Exception) -> None:
        """Answer all queries that wait with an error."""
        for waiting in self._heap:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)

    def cancel(self) -> None:
        """Cancel all queries that wait."""
        for waiting in self._heap:
            waiting.answer.cancel()
