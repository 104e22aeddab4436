"""Many streams in one client process: python -m tests.faults.many_streams ADDRESS KIND STREAMS

`slow`: each stream keeps 8 requests in flight and takes an answer every 5 s, until stdin ends;
  the streams begin one after the other, not at one moment.
`burst`: each stream asks 5 times and reads to the end; prints how the streams ended, as JSON.
`deaf`: each stream sends requests and reads nothing, until stdin ends.
`half`: each stream sends the first 32 MiB of a request and never its end, until stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import grpc.aio
import numpy as np

from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.rpc.transport import CHANNEL_OPTIONS
from tests.faults.sequences import VOCAB

_IN_FLIGHT, _REQUESTS_PER_STREAM = 8, 5
_PAUSE_SECONDS = 5.0
_PART_BYTES, _HALF_PARTS = 1 << 20, 31
# gRPC shares a connection between channels with the same options.
_STREAMS_PER_CONNECTION = 100


def request(number: int, rows: int, k: int) -> teacher_pb2.ScoreRequest:
    tokens = np.random.default_rng(number).integers(0, VOCAB, rows + 1).astype(np.int32)
    return request_of(ScoreQuery(tokens, 1, top_k=k), str(number))


class Streams:
    """Stubs on separate connections."""

    def __init__(self, address: str, streams: int) -> None:
        count = -(-streams // _STREAMS_PER_CONNECTION)
        self._channels = [
            grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("test.number", number)])
            for number in range(count)
        ]
        self._stubs = [teacher_pb2_grpc.TeacherStub(channel) for channel in self._channels]

    def stub(self, number: int) -> teacher_pb2_grpc.TeacherAsyncStub:
        stub: teacher_pb2_grpc.TeacherAsyncStub = self._stubs[number % len(self._stubs)]  # type: ignore[assignment]
        return stub


async def slow(streams: Streams, number: int) -> None:
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        for count in range(10_000):
            await room.acquire()
            yield request(number * 10_000 + count, 128, 32)

    await asyncio.sleep(_PAUSE_SECONDS * number / _STREAMS_PER_CONNECTION)
    call = streams.stub(number).Score(requests())
    async for _ in call:
        room.release()
        await asyncio.sleep(_PAUSE_SECONDS)


async def deaf(streams: Streams, number: int) -> None:
    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        for count in range(10_000):
            yield request(number * 10_000 + count, 512, 32)

    call = streams.stub(number).Score(requests())
    await call.wait_for_connection()
    await asyncio.Event().wait()


async def half(streams: Streams, number: int) -> None:
    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        yield teacher_pb2.ScoreRequest(request_id="1", token_ids=bytes(_PART_BYTES), more=True)
        for _ in range(_HALF_PARTS):
            yield teacher_pb2.ScoreRequest(request_id="1", head_ids=bytes(_PART_BYTES), more=True)
        await asyncio.Event().wait()

    with suppress(grpc.aio.AioRpcError):
        async for _ in streams.stub(number).Score(requests()):
            pass


async def burst(streams: Streams, number: int) -> Counter[str]:
    async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
        for count in range(_REQUESTS_PER_STREAM):
            yield request(number * _REQUESTS_PER_STREAM + count, 32, 4)

    outcomes: Counter[str] = Counter()
    try:
        async for chunk in streams.stub(number).Score(requests()):
            error = chunk.error if chunk.HasField("error") else None
            outcomes[f"{error.code}, again in {error.retry_after_ms > 0}" if error else "rows"] += 1
    except grpc.aio.AioRpcError as error:
        outcomes[f"stream: {error.code().name}"] += 1
    return outcomes


async def main(address: str, kind: str, count: int) -> None:
    streams = Streams(address, count)
    endless = {"slow": slow, "deaf": deaf, "half": half}
    if kind in endless:
        tasks = [asyncio.create_task(endless[kind](streams, number)) for number in range(count)]
        print("the readers are at work", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    else:
        outcomes = await asyncio.gather(*(burst(streams, number) for number in range(count)))
        print(json.dumps(sum(outcomes, Counter())), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
