"""T5 and T15: who gives up, dies or has no time left costs at most the batch that runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from clients.teacher.pending_answer import RowAssembly
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.rows.codec import RowBlock
from protos.rpc.transport import CHANNEL_OPTIONS
from teacher_service.engines.fake import FakeEngine, FakeSettings
from tests.teacher_service.conftest import StartTeacher

ROOT = Path(__file__).parents[3]
WAIT = 60.0
BATCH_MS = 150
NOTICED_SECONDS = 0.1
TRIES = 10


def fake(latency_ms: int, *args: str) -> list[str]:
    return ["--engine", "fake", "--model", f"vocab=64,latency_ms={latency_ms}", *args]


def queries(count: int) -> list[ScoreQuery]:
    tokens = np.random.default_rng(0).integers(0, 60, (count, 20)).astype(np.int32)
    return [ScoreQuery(row, 1, top_k=4, f32=True) for row in tokens]


def load(stub: teacher_pb2_grpc.TeacherStub) -> teacher_pb2.TeacherLoad:
    return stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=WAIT).load


@pytest.fixture
def stub(
    start_teacher: StartTeacher, request: pytest.FixtureRequest
) -> Iterator[teacher_pb2_grpc.TeacherStub]:
    """Of a teacher that takes a sequence at a time, each BATCH_MS or as a test says."""
    latency = getattr(request, "param", BATCH_MS)
    teacher = start_teacher(*fake(latency, "--max-batch-tokens", "20"))
    with grpc.insecure_channel(teacher.address, options=CHANNEL_OPTIONS) as channel:
        stub = teacher_pb2_grpc.TeacherStub(channel)
        stub.address = teacher.address  # type: ignore[attr-defined]
        yield stub


def cancelled(stub: Any) -> Callable[[], None]:
    stream = stub.Score(iter([request_of(query, str(n)) for n, query in enumerate(queries(50))]))
    next(stream)
    return lambda: bool(stream.cancel()) and None


def out_of_time(stub: Any) -> Callable[[], None]:
    requests = iter([request_of(query, str(n)) for n, query in enumerate(queries(50))])
    ends = time.monotonic() + 4 * BATCH_MS / 1000
    stream = stub.Score(requests, timeout=4 * BATCH_MS / 1000)
    next(stream)
    return lambda: time.sleep(max(0.0, ends - time.monotonic()))


CLIENT = """
import sys
from clients.teacher.client import TeacherClient
from tests.teacher_service.serving.test_cancellation import queries
with TeacherClient(sys.argv[1]) as client:
    answers = [client.submit(query) for query in queries(50)]
    answers[0].result(60)
    print("one", flush=True)
    answers[-1].result(60)
"""


def killed(stub: Any) -> Callable[[], None]:
    command = [sys.executable, "-c", CLIENT, stub.address]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"one\n"

    def kill() -> None:
        process.kill()
        process.communicate()

    return kill


@pytest.mark.parametrize("begin", [cancelled, out_of_time, killed])
def test_work_stops_with_its_client(
    stub: teacher_pb2_grpc.TeacherStub,
    begin: Callable[[Any], Callable[[], None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fifty sequences were asked for; after the end of their client at most one more is scored.

    What else the machine does can only delay the teacher, so a try in which it was late, to read
    the fifty or to notice their end, is repeated; every assertion is about one try.
    """
    for attempt in range(1, TRIES + 1):
        first = load(stub)
        end = begin(stub)
        end()
        start, before = time.monotonic(), load(stub)
        while (now := load(stub)).active_streams:
            assert time.monotonic() - start < 5
            time.sleep(0.002)
        noticed = time.monotonic() - start
        time.sleep(2.5 * BATCH_MS / 1000)
        after = load(stub)
        with capsys.disabled():
            print(f"\nT5 {begin.__name__}: noticed after {1000 * noticed:.1f} ms,", end=" ")
            print(f"{after.forwards - before.forwards} more forwards, try {attempt}")
        cancelled_count = after.cancelled - first.cancelled
        if noticed <= NOTICED_SECONDS and cancelled_count >= 40:
            break
    assert noticed <= NOTICED_SECONDS
    assert now.queued_tokens == after.queued_tokens == 0
    assert after.forwards - before.forwards <= 1
    assert after.forwards - first.forwards < 10
    assert cancelled_count >= 40


def test_a_hundred_give_up_among_a_thousand(start_teacher: StartTeacher) -> None:
    """1,000 streams of one request each; the 900 others get exactly their rows."""
    teacher = start_teacher(*fake(5, "--max-batch-tokens", "200"))
    score_queries = queries(1000)
    expected = FakeEngine(FakeSettings(vocab=64)).score(score_queries)
    quitters = {*np.random.default_rng(1).permutation(1000)[:100].tolist()}

    async def ask(stub: Any, number: int) -> RowBlock | None:
        call = stub.Score(iter([request_of(score_queries[number], str(number))]))
        if number in quitters:
            await asyncio.sleep(0.001 * (number % 97))
            call.cancel()
            return None
        assembly, block = RowAssembly(score_queries[number]), None
        async for chunk in call:
            assert chunk.request_id == str(number)
            block = assembly.add(chunk, 64)
        return block

    async def main() -> list[RowBlock | None]:
        async with grpc.aio.insecure_channel(teacher.address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = teacher_pb2_grpc.TeacherStub(channel)
            blocks = await asyncio.gather(*(ask(stub, number) for number in range(1000)))
            ended = (await stub.GetInfo(teacher_pb2.GetInfoRequest())).load
            assert (ended.queued_tokens, ended.active_streams) == (0, 0)
            return blocks

    for number, (block, exact) in enumerate(zip(asyncio.run(main()), expected, strict=True)):
        if number in quitters:
            continue
        assert isinstance(block, RowBlock)
        assert isinstance(exact, RowBlock)
        assert block.head_logprobs.tobytes() == exact.head_logprobs.tobytes()
        np.testing.assert_array_equal(block.head_ids, exact.head_ids)
    assert teacher.stop() == 0


@pytest.mark.parametrize("stub", [2000], indirect=True)
def test_who_has_no_time_left_never_reaches_the_model(stub: teacher_pb2_grpc.TeacherStub) -> None:
    """T15: one sequence keeps the model busy; fifty callers with less time than that wait."""
    first = stub.Score(iter([request_of(queries(1)[0], "first")]))
    while load(stub).active_streams == 0:
        time.sleep(0.01)
    time.sleep(0.1)
    late = [
        stub.Score(iter([request_of(query, "late")]), timeout=seconds)
        for seconds in (1e-9, 1e-4, 1e-3, 0.02, 0.05)
        for query in queries(11)[1:]
    ]
    for call in late:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    assert load(stub).forwards == 0, "the model was not busy for long enough"
    assert [chunk.last for chunk in first] == [True]
    time.sleep(0.5)
    assert (load(stub).forwards, load(stub).queued_tokens) == (1, 0)
