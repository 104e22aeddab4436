"""One Score stream and a client that reads slowly: what it holds is bounded, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos import teacher_pb2
from protos.errors import Corrupt, InvalidInput, Overloaded
from teacher_service.serving import score_stream
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.score_stream import ScoreStream
from teacher_service.serving.validation import RequestLimits

ROWS, TOP_K = 4096, 1024
LIMITS = RequestLimits(vocab_size=1 << 17, max_length=1 << 16, max_top_k=TOP_K)


def request(number: int, rows: int = ROWS) -> teacher_pb2.ScoreRequest:
    tokens = bytes(4 * (rows + 1))
    return teacher_pb2.ScoreRequest(request_id=str(number), token_ids=tokens, start=1, top_k=TOP_K)


class Conversation:
    """A client with `requests`; counts what the stream has read of them."""

    def __init__(
        self, requests: list[teacher_pb2.ScoreRequest], budget: AnswerBudget | None = None
    ) -> None:
        self.read = 0
        self._requests = requests
        self.stream = ScoreStream(self._send(), self._answer, LIMITS, budget)
        self.chunks = self.stream.chunks()

    async def _send(self) -> AsyncIterator[teacher_pb2.ScoreRequest]:
        for request in self._requests:
            self.read += 1
            yield request

    async def _answer(
        self, request: teacher_pb2.ScoreRequest
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        yield teacher_pb2.ScoreChunk(request_id=request.request_id)
        if not request.top_k:
            raise Corrupt("no")
        yield teacher_pb2.ScoreChunk(request_id=request.request_id, last=True)

    async def settled(self) -> int:
        for _ in range(50):
            await asyncio.sleep(0)
        return self.read


def test_a_reader_that_stops_stops_the_reading() -> None:
    async def main() -> list[str]:
        talk = Conversation([request(number) for number in range(60)])
        # 59 MB each: the fifth passes 256 MiB.
        assert await talk.settled() == 5
        first = [await anext(talk.chunks), await anext(talk.chunks)]
        assert await talk.settled() == 5, "the last chunk is not taken before the next is asked for"
        first.append(await anext(talk.chunks))
        assert await talk.settled() == 6
        return [chunk.request_id for chunk in [*first, *[c async for c in talk.chunks]]]

    assert sorted(asyncio.run(main())) == sorted(2 * [str(number) for number in range(60)])


def test_one_request_may_be_larger_than_the_bound() -> None:
    async def main() -> int:
        talk = Conversation([request(0, rows=40_000), request(1)])
        assert await talk.settled() == 1
        return len([chunk async for chunk in talk.chunks])

    assert asyncio.run(main()) == 4


def test_refused_requests_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_stream, "MAX_IN_FLIGHT", 3)

    async def main() -> list[teacher_pb2.ScoreChunk]:
        talk = Conversation([teacher_pb2.ScoreRequest(request_id=str(n)) for n in range(20)])
        assert await talk.settled() == 3
        return [chunk async for chunk in talk.chunks]

    chunks = asyncio.run(main())
    assert sum(chunk.error.code == "DATA_LOSS" for chunk in chunks) == 20


@pytest.mark.parametrize(
    "sizes",
    [{"tail_samples": (1 << 32) - 1}, {"top_k": (1 << 32) - 1}, {"token_ids": bytes(1 << 24)}],
    ids=["tail samples", "head ids", "tokens"],
)
def test_a_request_that_will_be_refused_takes_no_room_of_others(sizes: dict[str, Any]) -> None:
    """Its client does not take the refusal, so what it takes of the budget is not given back."""

    async def main() -> list[int]:
        budget = AnswerBudget()
        refused = request(0)
        for name, value in sizes.items():
            setattr(refused, name, value)
        abuser = Conversation([refused], budget)
        assert await abuser.settled() == 1
        others = [Conversation([request(number) for number in range(60)], budget) for _ in "ab"]
        counts = [await other.settled() for other in others]
        for conversation in (abuser, *others):
            conversation.stream.cancel()
        return counts

    # As without the refused request: the first stream takes half of the budget.
    assert asyncio.run(main()) == [5, 3]


def test_drain_answers_what_was_read() -> None:
    async def main() -> list[str]:
        talk = Conversation([request(number) for number in range(60)])
        await talk.settled()
        talk.stream.drain()
        return [chunk.request_id async for chunk in talk.chunks if chunk.last]

    assert asyncio.run(main()) == ["0", "1", "2", "3", "4"]


def test_an_overloaded_teacher_says_when_to_ask_again() -> None:
    async def full(request: teacher_pb2.ScoreRequest) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        raise Overloaded("the queue is full") if request.top_k else InvalidInput("no")
        yield teacher_pb2.ScoreChunk()

    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        yield request(0)
        yield teacher_pb2.ScoreRequest()

    async def main() -> dict[str, int]:
        chunks = [chunk async for chunk in ScoreStream(requests(), full, LIMITS).chunks()]
        return {chunk.error.code: chunk.error.retry_after_ms for chunk in chunks}

    assert asyncio.run(main()) == {"RESOURCE_EXHAUSTED": 1000, "INVALID_ARGUMENT": 0}


def parts_of(
    request_id: str, *parts: bytes, unfinished: bool = False
) -> list[teacher_pb2.ScoreRequest]:
    messages = [
        teacher_pb2.ScoreRequest(request_id=request_id, head_ids=p, more=True) for p in parts
    ]
    messages[0].token_ids = bytes(8)
    messages[-1].more = unfinished
    return messages


def test_parts_are_joined_and_unfinished_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_stream, "MAX_REQUEST_BYTES", 20)
    ids_by_request: dict[str, bytes] = {}

    async def record_ids(
        request: teacher_pb2.ScoreRequest,
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        assert not request.more
        ids_by_request[request.request_id] = request.head_ids
        yield teacher_pb2.ScoreChunk(request_id=request.request_id, last=True)

    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        messages = [
            *parts_of("whole", b"12345678", b"90ab", b"cdef"),
            *parts_of("cut off", b"1234", b"5678", unfinished=True),
            *parts_of("next", b"1234"),
            *parts_of("too large", b"12345678", b"12345678", b"12345678"),
            *parts_of("at the end", b"1234", unfinished=True),
        ]
        for message in messages:
            yield message

    async def main() -> dict[str, str]:
        budget = AnswerBudget(100)
        chunks = [
            chunk async for chunk in ScoreStream(requests(), record_ids, LIMITS, budget).chunks()
        ]
        assert budget._used == 0
        return {chunk.request_id: chunk.error.message for chunk in chunks if chunk.error.code}

    errors = asyncio.run(main())
    assert ids_by_request == {"whole": b"1234567890abcdef", "next": b"1234"}
    assert sorted(errors) == ["at the end", "cut off", "too large"]
    assert "24 bytes, but a request holds 20" in errors["too large"]


async def answer_nothing(
    request: teacher_pb2.ScoreRequest,
) -> AsyncIterator[teacher_pb2.ScoreChunk]:
    yield teacher_pb2.ScoreChunk(request_id=request.request_id, last=True)


def test_unfinished_requests_of_all_streams_have_one_limit() -> None:
    """Each stream could hold MAX_REQUEST_BYTES, without a limit for all of them."""
    size, streams = 100_000, 10

    async def main() -> dict[str, str]:
        budget = AnswerBudget(1 << 30, max_unfinished_bytes=3 * size)
        may_end = asyncio.Event()

        async def requests(stream: int) -> AsyncIterator[teacher_pb2.ScoreRequest]:
            first, last = parts_of(str(stream), bytes(size - 100), b"1234")
            yield first
            await may_end.wait()
            yield last

        calls = [
            ScoreStream(requests(number), answer_nothing, LIMITS, budget)
            for number in range(streams)
        ]
        for _ in range(200):
            await asyncio.sleep(0)
        assert 2 * size < budget._unfinished <= 3 * size
        assert budget._used == budget._unfinished
        may_end.set()
        chunks = [chunk for call in calls async for chunk in call.chunks()]
        assert (budget._unfinished, budget._used) == (0, 0)
        return {chunk.request_id: chunk.error.code for chunk in chunks}

    codes = asyncio.run(main())
    assert len(codes) == streams
    assert sorted(codes.values()) == [""] * 3 + ["RESOURCE_EXHAUSTED"] * 7


def test_the_first_message_of_an_unfinished_request_counts() -> None:
    """Its tokens may have 4 MiB, without any head id."""

    async def main() -> int:
        budget = AnswerBudget(1 << 30)

        async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
            yield teacher_pb2.ScoreRequest(request_id="1", token_ids=bytes(50_000), more=True)
            await asyncio.Event().wait()

        stream = ScoreStream(requests(), answer_nothing, LIMITS, budget)
        for _ in range(50):
            await asyncio.sleep(0)
        unfinished = budget._unfinished
        stream.cancel()
        assert (budget._unfinished, budget._used) == (0, 0)
        return unfinished

    assert asyncio.run(main()) >= 50_000


def test_a_request_whose_rest_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_stream, "PART_SECONDS", 0.05)

    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        await asyncio.sleep(0.2)  # between requests a client may be silent
        yield teacher_pb2.ScoreRequest(request_id="1", token_ids=bytes(8))
        yield teacher_pb2.ScoreRequest(request_id="2", head_ids=b"1234", more=True)
        await asyncio.Event().wait()

    async def main() -> None:
        stream, answered = ScoreStream(requests(), answer_nothing, LIMITS), []
        error = None
        try:
            async for chunk in stream.chunks():
                answered.append(chunk.request_id)
        except InvalidInput as caught:
            error = caught
        assert answered == ["1"]
        assert "did not arrive within" in str(error)

    asyncio.run(asyncio.wait_for(main(), 60))
