"""`AsyncTeacherClient`: a TeacherClient for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from clients.teacher.client import TeacherClient
from clients.teacher.info import TeacherInfo
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock


class AsyncTeacherClient:
    """Scores queries at one or several teacher services without blocking the event loop.

    Its methods have the arguments, results and errors of the TeacherClient methods with the same
    name.
    """

    def __init__(self, address: str | Sequence[str], **options: Any) -> None:
        """Arguments as for TeacherClient. The connections open on first use."""
        self._client = TeacherClient(address, **options)

    async def __aenter__(self) -> AsyncTeacherClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def info(self) -> TeacherInfo:
        """Return the model, fingerprint and limits of the teachers.

        All teachers of a client share them.
        """
        return await asyncio.to_thread(self._client.info)

    async def vocabulary(self) -> list[str]:
        """Return the teacher's tokens; the index is the token id."""
        return await asyncio.to_thread(self._client.vocabulary)

    def submit(self, query: ScoreQuery) -> asyncio.Future[RowBlock]:
        """Request the rows of `query`, and return a future of the rows at once.

        Call this method in an event loop.
        """
        return asyncio.wrap_future(self._client.submit(query))

    async def score(self, queries: Iterable[ScoreQuery]) -> list[RowBlock]:
        """Return the rows of each query, in order. Cancelling the call cancels the queries."""
        futures = [self.submit(query) for query in queries]
        try:
            return [await future for future in futures]
        finally:
            _cancel_all(futures)

    async def as_completed(
        self, queries: Iterable[ScoreQuery]
    ) -> AsyncIterator[tuple[int, RowBlock]]:
        """Yield (index of the query, its rows) for each query as soon as its rows arrive."""
        finished_futures: asyncio.Queue[asyncio.Future[RowBlock]] = asyncio.Queue()
        numbers = {self.submit(query): number for number, query in enumerate(queries)}
        for future in numbers:
            future.add_done_callback(finished_futures.put_nowait)
        try:
            while numbers:
                future = await finished_futures.get()
                yield numbers.pop(future), future.result()
        finally:
            _cancel_all(numbers)

    async def push_weights(
        self, tensors: Mapping[str, NDArray[Any]], *, tau: float | None = None
    ) -> TeacherInfo:
        """Replace the teacher's weights, or average them with `tau`. Return the new TeacherInfo."""
        return await asyncio.to_thread(self._client.push_weights, tensors, tau=tau)

    async def close(self) -> None:
        """Cancel all unfinished futures, close the connections and join the threads."""
        await asyncio.to_thread(self._client.close)


def _cancel_all(futures: Iterable[asyncio.Future[RowBlock]]) -> None:
    for future in futures:
        future.cancel()
