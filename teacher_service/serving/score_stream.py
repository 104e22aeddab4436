"""One Score stream: many requests in flight, answered in any order, each fault told to its request
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from protos import teacher_pb2
from protos.errors import DistillError, Overloaded
from protos.rpc.failpoints import failpoint
from protos.rpc.statuses import public_error
from teacher_service.serving.validation import MAX_REQUEST_ID_CHARS

# What one stream works on, and holds for a client that reads slowly; further requests stay in the
# network until an answer has been taken. A single request may be larger.
MAX_IN_FLIGHT = 256
MAX_IN_FLIGHT_BYTES = 256 << 20
_MAX_WAITING_CHUNKS = 16
# Of an answer, encoded and decoded: ids (2.25 + 4 bytes), log-probs (4 + 4) and up to three floats
# a row.
_HEAD_ID_BYTES, _ROW_BYTES, _SAMPLE_BYTES = 14, 24, 7


@dataclass(frozen=True)
class _Answered:
    """Follows the last chunk of an answer whose rows take `size` bytes."""

    size: int


Answer = Callable[[teacher_pb2.ScoreRequest], AsyncIterator[teacher_pb2.ScoreChunk]]


class ScoreStream:
    """Owns the tasks of one call; `cancel` ends them all."""

    def __init__(self, requests: AsyncIterator[teacher_pb2.ScoreRequest], answer: Answer) -> None:
        self._requests = requests
        self._answer = answer
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._taken = asyncio.Event()
        self._outgoing: asyncio.Queue[teacher_pb2.ScoreChunk | _Answered | None] = asyncio.Queue(
            _MAX_WAITING_CHUNKS
        )
        self._answers: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())
        self._closer = asyncio.create_task(self._close_when_done())

    async def chunks(self) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        """The answers, until the client has no more requests or `drain` was called.

        Raises InvalidInput, after what was asked before it, for a request that cannot be read.
        """
        try:
            while (item := await self._outgoing.get()) is not None:
                if isinstance(item, _Answered):
                    self._release(item.size)
                else:
                    # Asked for the next one, gRPC has taken this one.
                    yield item
            self._raise_unreadable()
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
        # Room before the request: what was read is always answered.
        async for request in self._requests:
            failpoint("request-read")
            size = _answer_bytes(request)
            self._in_flight += 1
            self._in_flight_bytes += size
            task = asyncio.create_task(self._answer_one(request, size))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
            await self._wait_for_room()

    def _raise_unreadable(self) -> None:
        """Where it was not the end of the stream, or of the connection, that stopped the reader."""
        error = None if self._reader.cancelled() else self._reader.exception()
        if isinstance(error, DistillError):
            raise error

    async def _wait_for_room(self) -> None:
        while self._in_flight >= MAX_IN_FLIGHT or self._in_flight_bytes >= MAX_IN_FLIGHT_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def _release(self, size: int) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= size
        self._taken.set()

    async def _close_when_done(self) -> None:
        # Cancelled by `drain`, or broken with the connection: either way there is nothing more to
        # read.
        await asyncio.gather(self._reader, return_exceptions=True)
        while self._answers:
            await asyncio.wait(self._answers)
        await self._outgoing.put(None)

    async def _answer_one(self, request: teacher_pb2.ScoreRequest, size: int) -> None:
        try:
            async for chunk in self._answer(request):
                await self._outgoing.put(chunk)
        except Exception as error:
            await self._outgoing.put(_refusal(request, error))
        await self._outgoing.put(_Answered(size))


def _answer_bytes(request: teacher_pb2.ScoreRequest) -> int:
    """What the answer will take, of a request that nobody has checked yet."""
    rows = max(0, len(request.token_ids) // 4 - request.start)
    ids = len(request.head_ids) // 4 or rows * request.top_k
    return _HEAD_ID_BYTES * ids + (_ROW_BYTES + _SAMPLE_BYTES * request.tail_samples) * rows


def _refusal(request: teacher_pb2.ScoreRequest, error: Exception) -> teacher_pb2.ScoreChunk:
    fault = public_error(error, "Score")
    pause = fault.retry_after_ms if isinstance(fault, Overloaded) else 0
    return teacher_pb2.ScoreChunk(
        request_id=request.request_id[:MAX_REQUEST_ID_CHARS],
        last=True,
        error=teacher_pb2.RequestError(
            code=fault.code,
            message=fault.message,
            field=fault.field,
            hint=fault.hint,
            retry_after_ms=pause,
        ),
    )
