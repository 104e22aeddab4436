"""The clients of the HTTP front: their turns at the engine, and the memory that they may use."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from protos.errors import Overloaded
from teacher_service.serving.answer_budget import AnswerBudget, BudgetShare
from teacher_service.serving.fair_queue import Sender

# Of the bodies of all requests that are not yet answered.
MAX_BODIES_BYTES = 256 << 20


@dataclass
class Caller:
    """The requests of one client that are in progress: one turn at the engine, one share."""

    share: BudgetShare
    sender: Sender = field(default_factory=Sender)
    requests: int = 0

    @asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Wait until the client's share has room for an answer of `size` bytes; hold it inside."""
        while not self.share.has_room:
            await self.share.change()
        self.share.take(size)
        try:
            yield
        finally:
            self.share.give_back(size)


class Callers:
    """The clients that have requests in progress.

    A client is a machine with a token: its connections share one turn at the engine, because an
    HTTP client opens one for each request at a time. Use it from one event loop.
    """

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self._callers: dict[tuple[str, bytes], Caller] = {}
        self._bodies = 0

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return sum(caller.requests for caller in self._callers.values())

    @contextmanager
    def enter(self, scope: Scope, body_bytes: int) -> Iterator[Caller]:
        """Give the client of a request inside the block; `body_bytes` is the size of its body.

        Raises Overloaded if the bodies of all requests take too much memory.
        """
        if self._bodies + body_bytes > MAX_BODIES_BYTES:
            raise Overloaded(
                f"the requests in progress take {self._bodies >> 20} MiB",
                hint="retry in a second, or run a second teacher",
            )
        token = Headers(scope=scope).get("authorization", "")
        key = (scope["client"] or ("",))[0], hashlib.sha256(token.encode()).digest()
        caller = self._callers.get(key) or Caller(self._budget.share())
        self._callers[key] = caller
        caller.requests += 1
        self._bodies += body_bytes
        try:
            yield caller
        finally:
            self._bodies -= body_bytes
            caller.requests -= 1
            if not caller.requests:
                del self._callers[key]
