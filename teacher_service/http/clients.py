"""The clients of the HTTP API. Each client has one share of the engine and of the answer budget."""

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

# The limit for the bodies of all requests that are not yet answered.
MAX_BODIES_BYTES = 256 << 20


@dataclass
class HttpClient:
    """One client and its requests in progress.

    - share: the client's share of the answer budget.
    - sender: the client's place in the queue.
    - requests: number of requests in progress.
    """

    share: BudgetShare
    sender: Sender = field(default_factory=Sender)
    requests: int = 0

    @asynccontextmanager
    async def reserve_memory(self, size: int) -> AsyncIterator[None]:
        """Wait until this client's share of the answer budget has room, and then take `size` bytes.

        The bytes are given back at the end of the `async with` block.
        """
        while not self.share.has_room:
            await self.share.wait_for_release()
        self.share.take(size)
        try:
            yield
        finally:
            self.share.give_back(size)


class HttpClients:
    """The clients that have requests in progress.

    A client is a pair of a machine and a token. All its connections share one place in the queue,
    because an HTTP client opens a connection for each concurrent request. Use this class from one
    event loop.
    """

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self._clients: dict[tuple[str, bytes], HttpClient] = {}
        self._bodies = 0

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return sum(client.requests for client in self._clients.values())

    @contextmanager
    def enter(self, scope: Scope, body_bytes: int) -> Iterator[HttpClient]:
        """Yield the client of a request; `body_bytes` is the size of its body.

        Raises Overloaded if the bodies of all requests take too much memory.
        """
        if self._bodies + body_bytes > MAX_BODIES_BYTES:
            raise Overloaded(
                f"the requests in progress take {self._bodies >> 20} MiB",
                hint="retry in a second, or run a second teacher",
            )
        token = Headers(scope=scope).get("authorization", "")
        key = (scope["client"] or ("",))[0], hashlib.sha256(token.encode()).digest()
        client = self._clients.get(key) or HttpClient(self._budget.share())
        self._clients[key] = client
        client.requests += 1
        self._bodies += body_bytes
        try:
            yield client
        finally:
            self._bodies -= body_bytes
            client.requests -= 1
            if not client.requests:
                del self._clients[key]
