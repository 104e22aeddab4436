"""Many clients ask one uncached sequence: the model runs once, whichever client cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import numpy as np

from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2, teacher_pb2_grpc
from tests.faults.sequences import fake
from tests.teacher_service.conftest import StartTeacher

CLIENTS = 100
QUERY = ScoreQuery(np.arange(1, 200, dtype=np.int32) % 64, 1, top_k=4)


def test_a_hundred_clients_and_one_forward(start_teacher: StartTeacher, tmp_path: Path) -> None:
    """C3. The first client cancels while the model still computes its sequence."""
    teacher = start_teacher(*fake(latency_ms=2000), "--cache-dir", str(tmp_path / "rows"))

    async def ask(address: str) -> bytes:
        # A separate connection, as a separate client would have.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:

            async def requests() -> AsyncIterator[teacher_pb2.ScoreRequest]:
                yield request_of(QUERY, "one")

            stream = teacher_pb2_grpc.TeacherStub(channel).Score(requests())
            return b"".join([chunk.payload async for chunk in stream])

    async def main() -> tuple[list[bytes], teacher_pb2.TeacherInfo]:
        async with grpc.aio.insecure_channel(teacher.address) as channel:
            stub = teacher_pb2_grpc.TeacherStub(channel)
            forwards_before = (await stub.GetInfo(teacher_pb2.GetInfoRequest())).load.forwards
            leader = asyncio.create_task(ask(teacher.address))
            while not (await stub.GetInfo(teacher_pb2.GetInfoRequest())).load.active_streams:
                await asyncio.sleep(0.01)
            followers = [asyncio.create_task(ask(teacher.address)) for _ in range(CLIENTS - 1)]
            while not leader.done():
                load = (await stub.GetInfo(teacher_pb2.GetInfoRequest())).load
                if load.active_streams == CLIENTS:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the query of the last stream follows
            leader.cancel()
            answers = await asyncio.gather(*followers)
            info = await stub.GetInfo(teacher_pb2.GetInfoRequest())
            info.load.forwards -= forwards_before
            return answers, info

    answers, info = asyncio.run(main())
    assert len({*answers}) == 1
    assert answers[0]
    print(
        f"{CLIENTS} clients of one cold sequence, the first cancelled: {info.load.forwards} forward"
    )
    assert info.load.forwards == 1
    assert info.load.scored_tokens == QUERY.rows
