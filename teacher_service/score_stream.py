"""One Score stream: many requests in flight, answered in any order, each fault told to its request
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from protos import teacher_pb2
from protos.transport import told
from teacher_service.validation import MAX_REQUEST_ID_CHARS

# Requests of one stream that are worked on; further ones stay in the network until one is answered.
MAX_IN_FLIGHT = 256
_MAX_WAITING_CHUNKS = 16

Answer = Callable[[teacher_pb2.ScoreRequest], AsyncIterator[teacher_pb2.ScoreChunk]]


class ScoreStream:
    """Owns the tasks of one call; `cancel` ends them all."""

    def __init__(self, requests: AsyncIterator[teacher_pb2.ScoreRequest], answer: Answer) -> None:
        self._requests = requests
        self._answer = answer
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._outgoing: asyncio.Queue[teacher_pb2.ScoreChunk | None] = asyncio.Queue(
            _MAX_WAITING_CHUNKS
        )
        self._answers: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())
        self._closer = asyncio.create_task(self._close_when_done())

    async def chunks(self) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        """The answers, until the client has no more requests or `drain` was called."""
        try:
            while (chunk := await self._outgoing.get()) is not None:
                yield chunk
        finally:
            self.cancel()

    def drain(self) -> None:
        """Read no further request; what was read is still answered, then the stream ends."""
        self._reader.cancel()

    def cancel(self) -> None:
        """Nobody listens any more."""
        for task in (self._reader, self._closer, *self._answers):
            task.cancel()

    async def _read(self) -> None:
        # The slot before the request: what was read is always answered.
        await self._slots.acquire()
        async for request in self._requests:
            task = asyncio.create_task(self._answer_one(request))
            self._answers.add(task)
            task.add_done_callback(self._forget)
            await self._slots.acquire()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._answers.discard(task)
        self._slots.release()

    async def _close_when_done(self) -> None:
        # Cancelled by `drain`, or broken with the connection: either way there is nothing more to
        # read.
        await asyncio.gather(self._reader, return_exceptions=True)
        while self._answers:
            await asyncio.wait(self._answers)
        await self._outgoing.put(None)

    async def _answer_one(self, request: teacher_pb2.ScoreRequest) -> None:
        try:
            async for chunk in self._answer(request):
                await self._outgoing.put(chunk)
        except Exception as error:
            fault = told(error, "Score")
            await self._outgoing.put(
                teacher_pb2.ScoreChunk(
                    request_id=request.request_id[:MAX_REQUEST_ID_CHARS],
                    last=True,
                    error=teacher_pb2.RequestError(
                        code=fault.code,
                        message=fault.message,
                        field=fault.field,
                        hint=fault.hint,
                    ),
                )
            )
