"""One Score call: many requests are in flight, and their answers are sent in any order.

An error of one request does not end the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from clients.teacher.query import MAX_TAIL_SAMPLES
from protos import teacher_pb2
from protos.errors import DistillError, InvalidInput, Overloaded
from protos.rpc.failpoints import failpoint
from protos.rpc.statuses import public_error
from protos.rpc.transport import MAX_REQUEST_BYTES
from teacher_service.serving.answer_budget import AnswerBudget, BudgetShare
from teacher_service.serving.validation import MAX_REQUEST_ID_CHARS, RequestLimits

# The fields of a request that may be in several messages.
_FIELDS: tuple[Literal["head_ids"], Literal["draw_ids"], Literal["images"]]
_FIELDS = ("head_ids", "draw_ids", "images")

Request = tuple[teacher_pb2.ScoreRequest, DistillError | None]

# If a stream reaches this limit, or the process reaches the limit of AnswerBudget, further requests
# stay in the network until a client takes an answer.
MAX_IN_FLIGHT = 256
_MAX_WAITING_CHUNKS = 16
# Time limit for the next message (at most 4 MiB) of a request in several messages.
PART_SECONDS = 120.0
# Memory of an answer, encoded and decoded: per head id 2.25 + 4 bytes for the id and 4 + 4 for the
# log-prob; per row up to three floats twice; per tail sample the id.
_HEAD_ID_BYTES, _ROW_BYTES, _SAMPLE_BYTES = 14, 24, 7
Answer = Callable[[teacher_pb2.ScoreRequest], AsyncIterator[teacher_pb2.ScoreChunk]]


class RequestParts:
    """Collects the messages of one request of a stream until the request is complete.

    If the field `more` of a message is true, a message with further ids or images of the same
    request follows (protos/teacher.proto). `share` is the stream's part of the memory budget; the
    bytes of the collected messages are taken from it.
    """

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._first: teacher_pb2.ScoreRequest | None = None
        self._ids: dict[str, list[bytes]] = {name: [] for name in _FIELDS}
        self._bytes = 0
        self._is_refused = False

    @property
    def is_unfinished(self) -> bool:
        """True if a part of a request has arrived, and its further messages have not."""
        return self._first is not None

    def add(self, message: teacher_pb2.ScoreRequest) -> list[Request]:
        """Add a message. Return the requests that are complete now, each with its error or None.

        If `message` belongs to a new request, the unfinished request is returned with an error.
        """
        requests: list[Request] = []
        if self._first is not None and message.request_id != self._first.request_id:
            requests += self.take_unfinished()
        if self._first is None:
            if not message.more:
                return [*requests, (message, None)]
            self._first = message
        for name in _FIELDS:
            self._store_part(name, getattr(message, name))
        if message is self._first:
            self._hold_first(message)
        if not message.more:
            requests.append(self._join_parts())
        return requests

    def take_unfinished(self) -> list[Request]:
        """Return the unfinished request with an error, if there is one."""
        if self._first is None:
            return []
        request, _ = self._join_parts()
        return [(request, _size_error("further messages of this request are missing"))]

    def _store_part(self, name: str, ids: bytes) -> None:
        self._bytes += len(ids)
        if ids and self._bytes <= MAX_REQUEST_BYTES and not self._is_refused:
            if self._share.take_unfinished(len(ids)):
                self._ids[name].append(ids)
            else:
                self._is_refused = True

    def _hold_first(self, message: teacher_pb2.ScoreRequest) -> None:
        """Take memory for the other fields of the first message, such as the token ids.

        The fields of _FIELDS are removed from the message, because they are collected separately.
        """
        for name in _FIELDS:
            message.ClearField(name)
        size = message.ByteSize()
        if self._is_refused or not self._share.take_unfinished(size):
            self._is_refused = True
            request_id = message.request_id
            message.Clear()
            message.request_id, message.more = request_id, True

    def _join_parts(self) -> Request:
        assert self._first is not None
        request, size, parts_by_name = self._first, self._bytes, self._ids
        is_refused = self._is_refused
        request.more = False
        self._share.give_back_unfinished()
        self._first, self._ids, self._bytes = None, {name: [] for name in _FIELDS}, 0
        self._is_refused = False
        if size <= MAX_REQUEST_BYTES and not is_refused:
            for name, ids in parts_by_name.items():
                if ids:
                    setattr(request, name, b"".join(ids))
            return request, None
        for name in _FIELDS:
            request.ClearField(name)
        if is_refused:
            return request, Overloaded(
                "the teacher holds too many requests that have not arrived completely",
                hint="try again",
            )
        return request, _size_error(f"{size} bytes, but a request holds {MAX_REQUEST_BYTES}")


def _size_error(message: str) -> InvalidInput:
    return InvalidInput(
        message, field="head_ids", hint="use fewer head ids per position, or smaller images"
    )


@dataclass(frozen=True)
class _AnswerEnd:
    """The queue's entry after the last chunk of an answer; `size` is the answer's bytes."""

    size: int


class ScoreStream:
    """The tasks of one Score call: a reader, and one task per request in flight.

    - answer: a function that yields the chunks of one request, or raises an error for the request,
      for example if the request exceeds `limits`.
    - limits: the limits of the teacher.
    - budget: limits the answers of all streams; None creates a budget for this stream alone.

    `cancel` stops all tasks. Create the object inside a running event loop.
    """

    def __init__(
        self,
        requests: AsyncIterator[teacher_pb2.ScoreRequest],
        answer: Answer,
        limits: RequestLimits,
        budget: AnswerBudget | None = None,
    ) -> None:
        self._requests = requests
        self._answer = answer
        self._limits = limits
        self._in_flight = 0
        self._share = (budget or AnswerBudget()).share()
        self._fault: DistillError | None = None
        self._outgoing: asyncio.Queue[teacher_pb2.ScoreChunk | _AnswerEnd | None] = asyncio.Queue(
            _MAX_WAITING_CHUNKS
        )
        self._answers: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())
        self._closer = asyncio.create_task(self._close_when_done())

    async def chunks(self) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        """Yield the chunks of all answers until the client ends its requests or `drain` is called.

        An error of one request is yielded as its last chunk. If a request cannot be read, raises
        InvalidInput after the earlier requests are answered. After `fail`, raises the error of
        `fail`.
        """
        try:
            while (entry := await self._outgoing.get()) is not None:
                if isinstance(entry, _AnswerEnd):
                    self._release(entry.size)
                else:
                    if self._fault:
                        break
                    # Code after this line runs once gRPC has taken the chunk and wants the next.
                    yield entry
            if self._fault:
                raise self._fault
            self._raise_unreadable()
        finally:
            self.cancel()

    def drain(self) -> None:
        """Stop reading requests. The stream ends after the requests read so far are answered."""
        self._reader.cancel()

    def fail(self, fault: DistillError) -> None:
        """End the stream with the error `fault`; requests in flight get no answer."""
        self._fault = fault
        for task in (self._reader, *self._answers):
            task.cancel()

    def cancel(self) -> None:
        """Cancel all tasks, because the client has disconnected."""
        for task in (self._reader, self._closer, *self._answers):
            task.cancel()
        self._share.close()

    async def _read(self) -> None:
        # Wait for room before reading a request, so that every request read is answered.
        parts = RequestParts(self._share)
        messages = aiter(self._requests)
        while (message := await self._next_message(messages, parts)) is not None:
            failpoint("request-read")
            for request, error in parts.add(message):
                self._start(request, error)
            await self._wait_for_room()
        for request, error in parts.take_unfinished():
            self._start(request, error)

    async def _next_message(
        self, messages: AsyncIterator[teacher_pb2.ScoreRequest], parts: RequestParts
    ) -> teacher_pb2.ScoreRequest | None:
        """Return the next message, or None at the end of the requests.

        Raises InvalidInput if the next message of an unfinished request does not arrive in time.
        """
        try:
            async with asyncio.timeout(PART_SECONDS if parts.is_unfinished else None):
                return await anext(messages, None)
        except TimeoutError as error:
            self._share.give_back_unfinished()
            raise InvalidInput(
                f"the rest of a request did not arrive within {PART_SECONDS:g} s",
                field="more",
                hint="send all messages of a request one after the other",
            ) from error

    def _start(self, request: teacher_pb2.ScoreRequest, error: DistillError | None) -> None:
        size = 0 if error else _estimate_answer_bytes(request, self._limits)
        self._in_flight += 1
        self._share.take(size)
        task = asyncio.create_task(self._answer_one(request, size, error))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _raise_unreadable(self) -> None:
        """Raise the reader's error if a bad request has ended the reader."""
        error = None if self._reader.cancelled() else self._reader.exception()
        if isinstance(error, DistillError):
            raise error

    async def _wait_for_room(self) -> None:
        # If no request is in flight, the share holds the first parts of a request, and the reader
        # must read the other parts.
        while self._in_flight and (self._in_flight >= MAX_IN_FLIGHT or not self._share.has_room):
            await self._share.wait_for_release()

    def _release(self, size: int) -> None:
        self._in_flight -= 1
        self._share.give_back(size)

    async def _close_when_done(self) -> None:
        # The reader ended, was cancelled by `drain`, or lost the connection: there are no more
        # requests in any case.
        await asyncio.gather(self._reader, return_exceptions=True)
        while self._answers:
            await asyncio.wait(self._answers)
        await self._outgoing.put(None)

    async def _answer_one(
        self, request: teacher_pb2.ScoreRequest, size: int, error: DistillError | None
    ) -> None:
        try:
            if error:
                raise error
            async for chunk in self._answer(request):
                await self._outgoing.put(chunk)
        except Exception as error:  # noqa: BLE001 (the request is answered with it)
            await self._outgoing.put(_build_error_chunk(request, error))
        await self._outgoing.put(_AnswerEnd(size))


def _estimate_answer_bytes(request: teacher_pb2.ScoreRequest, limits: RequestLimits) -> int:
    """Return the estimated memory of the answer, and of its images, in bytes.

    The request is not validated yet. For a request that is too large and will be refused, the
    number of rows is taken as 0.
    """
    rows = max(0, len(request.token_ids) // 4 - request.start)
    if (
        rows >= limits.max_length
        or request.top_k > limits.max_top_k
        or request.tail_samples > MAX_TAIL_SAMPLES
    ):
        rows = 0
    ids = len(request.head_ids) // 4 or rows * request.top_k
    ids += len(request.draw_ids) // 4
    answer = _HEAD_ID_BYTES * ids + (_ROW_BYTES + _SAMPLE_BYTES * request.tail_samples) * rows
    return answer + len(request.images)


def _build_error_chunk(
    request: teacher_pb2.ScoreRequest, error: Exception
) -> teacher_pb2.ScoreChunk:
    fault = public_error(error, "Score")
    retry_after_ms = fault.retry_after_ms if isinstance(fault, Overloaded) else 0
    return teacher_pb2.ScoreChunk(
        request_id=request.request_id[:MAX_REQUEST_ID_CHARS],
        last=True,
        error=teacher_pb2.RequestError(
            code=fault.code,
            message=fault.message,
            field=fault.field,
            hint=fault.hint,
            retry_after_ms=retry_after_ms,
        ),
    )
