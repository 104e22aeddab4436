"""The queue of queries that wait for the engine. Its order shares the engine among the senders."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from clients.teacher.query import ScoreQuery
from protos.errors import Overloaded
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngineInfo

MAX_QUEUED_BYTES = 256 << 20
_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class EngineAnswer:
    """The rows of one query: one row for each scored token, positions start to length - 1.

    `info` describes the engine when it computed the rows: its model, limits, fingerprint and the
    version of its weights. A later push of weights does not change this object.
    """

    block: RowBlock
    info: ScoringEngineInfo


class Sender:
    """One client's stream of queries; senders take turns, see FairQueue.

    - is_background: queries of this sender wait until no query of other senders waits.
    - turn: the turn of the sender's newest query, in tokens.
    - queries_in_engine: number of the sender's queries in the engine.
    - sends_singly: True if the sender's previous query and its current query were each alone: the
      sender had no other query without an answer at the same time.
    """

    def __init__(self, *, is_background: bool = False) -> None:
        self.is_background = is_background
        self.turn = 0.0  # the turn of the newest query, in tokens
        self.queries_in_engine = 0
        self._unanswered = 0
        self._had_several = False  # several queries at once, since the last time without any
        self.sends_singly = False

    def add_query(self) -> None:
        """Count a query that the client sends."""
        if self._unanswered:
            self._had_several, self.sends_singly = True, False
        self._unanswered += 1

    def remove_query(self) -> None:
        """Remove a query that was answered or cancelled."""
        self._unanswered -= 1
        if not self._unanswered:
            self._had_several, self.sends_singly = False, not self._had_several


@dataclass(frozen=True, order=True)
class QueuedQuery:
    """A query in the queue. Queries are ordered by `is_background`, `turn` and `number`.

    - is_background: the value of the sender.
    - turn: the query's turn in tokens, see FairQueue.
    - number: order of arrival.
    - answer: a future, which is cancelled if the caller does not need the answer any more.
    """

    is_background: bool
    turn: float
    number: int
    sender: Sender = field(compare=False)
    query: ScoreQuery = field(compare=False)
    answer: asyncio.Future[EngineAnswer] = field(compare=False)

    @property
    def tokens(self) -> int:
        """Number of tokens of the query."""
        return len(self.query.token_ids)


class FairQueue:
    """Orders queries by start-time fair queueing, in tokens (Goyal et al. 1996).

    A query waits for the earlier queries of its sender. Meanwhile, each other sender gets the same
    number of tokens as this sender. Queries with the same turn are computed in order of arrival.
    All senders start with the same turn. The engine computes each query completely. Use this class
    from one event loop; any thread may read `tokens`.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._arrivals = 0
        self._turn = 0.0  # the turn that the engine has reached
        self._heap: list[QueuedQuery] = []

    @property
    def arrival_count(self) -> int:
        """Number of queries that were added since the start."""
        return self._arrivals

    @property
    def tokens(self) -> int:
        """Number of tokens in the queries that wait."""
        return sum(entry.tokens for entry in tuple(self._heap) if not entry.answer.done())

    def add(self, query: ScoreQuery, sender: Sender) -> QueuedQuery:
        """Add a query. Call `release` when the answer has arrived.

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
        sender.add_query()
        self._arrivals += 1
        answer: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        entry = QueuedQuery(sender.is_background, turn, self._arrivals, sender, query, answer)
        heapq.heappush(self._heap, entry)
        return entry

    def release(self, entry: QueuedQuery) -> None:
        """Give back the memory of a query, answered or not."""
        self._bytes -= entry.query.nbytes + _ENTRY_BYTES
        entry.sender.remove_query()

    def peek(self) -> QueuedQuery | None:
        """Return the next query by turn, without removing it; None if the queue is empty."""
        while self._heap and self._heap[0].answer.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def take(self, tokens: int) -> list[QueuedQuery]:
        """Take queries in the order of their turns, until their tokens reach the limit.

        Takes at least one query if any waits. Call `put_back` for queries that the engine does not
        get.
        """
        entries: list[QueuedQuery] = []
        while self._heap and tokens > 0:
            entry = heapq.heappop(self._heap)
            if not entry.answer.done():
                entries.append(entry)
                tokens -= entry.tokens
        return entries

    def advance_to(self, entry: QueuedQuery) -> None:
        """Advance the current turn to a query that the engine computes; new queries follow it."""
        self._turn = max(self._turn, entry.turn)

    def put_back(self, entry: QueuedQuery) -> None:
        """Return a taken query to the queue, with its original turn."""
        heapq.heappush(self._heap, entry)

    def fail(self, error: Exception) -> None:
        """End all waiting queries with this error."""
        for entry in self._heap:
            if not entry.answer.done():
                entry.answer.set_exception(error)

    def cancel(self) -> None:
        """Cancel all waiting queries."""
        for entry in self._heap:
            entry.answer.cancel()
