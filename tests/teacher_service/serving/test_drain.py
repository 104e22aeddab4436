"""T3: SIGTERM. Not ready within a second, no new calls, all that was read is answered, exit 0."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError, Unavailable
from protos.rows.codec import RowBlock
from protos.rpc.statuses import fault_of
from protos.rpc.transport import CHANNEL_OPTIONS
from teacher_service.engines.fake import FakeEngine, FakeSettings
from tests.teacher_service.conftest import StartTeacher

WAIT = 60.0
SERVICE = "distill.v1.Teacher"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def slow(milliseconds: int) -> list[str]:
    model = f"vocab=64,latency_ms={milliseconds}"
    return ["--engine", "fake", "--model", model, "--max-batch-tokens", "40"]


def queries(count: int) -> list[ScoreQuery]:
    tokens = np.random.default_rng(0).integers(0, 60, (count, 20)).astype(np.int32)
    return [ScoreQuery(row, 1, top_k=4, f32=True) for row in tokens]


def follow(watch: Any, statuses: list[tuple[float, int]]) -> None:
    with suppress(grpc.RpcError):
        for message in watch:
            statuses.append((time.monotonic(), message.status))


def test_sigterm_drains(start_teacher: StartTeacher, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = start_teacher(*slow(100))
    score_queries = queries(40)
    answered: list[teacher_pb2.ScoreChunk] = []
    ready: list[tuple[float, int]] = []
    all_are_sent = threading.Event()

    def never_ending() -> Iterator[teacher_pb2.ScoreRequest]:
        for number, query in enumerate(score_queries):
            yield request_of(query, str(number))
        all_are_sent.set()
        threading.Event().wait(WAIT)

    with grpc.insecure_channel(teacher.address, options=CHANNEL_OPTIONS) as channel:
        stub = teacher_pb2_grpc.TeacherStub(channel)
        stream = stub.Score(never_ending())
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        watcher = threading.Thread(target=follow, args=(watch, ready))
        watcher.start()
        answered.append(next(stream))
        assert all_are_sent.wait(WAIT)
        stub.GetInfo(teacher_pb2.GetInfoRequest())  # read after the requests that were sent
        start = time.monotonic()
        teacher.send(signal.SIGTERM)
        answered.extend(stream)
        drained = time.monotonic() - start
        assert teacher.process.wait(WAIT) == 0
        ended = time.monotonic() - start
        watcher.join(WAIT)
    assert sorted(int(chunk.request_id) for chunk in answered) == list(range(40))
    assert all(chunk.last and not chunk.HasField("error") for chunk in answered)
    delay = next(at for at, status in ready if status == NOT_SERVING) - start
    with capsys.disabled():
        print(f"\nT3: NOT_SERVING after {delay:.3f} s, drained {drained:.2f} s, exit {ended:.2f} s")
    assert delay <= 1
    assert drained >= 0.5, "nothing was in flight"
    assert ended - drained < 2, "who watches its health must not keep it"


def info(stub: Any) -> teacher_pb2.TeacherInfo:
    teacher_info: teacher_pb2.TeacherInfo = stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=WAIT)
    return teacher_info


def refusal(address: str) -> DistillError:
    """What a client is told by the first call to `address` that fails.

    gRPC cancels a call that reaches the server as it closes its port, and refuses the next one.
    """
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        with grpc.insecure_channel(address) as channel:
            try:
                info(teacher_pb2_grpc.TeacherStub(channel))
            except grpc.RpcError as error:
                return fault_of(error, f"teacher {address}")
    raise TimeoutError(f"{address} goes on answering")


def test_new_calls_are_unavailable_while_it_drains(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*slow(500))
    score_queries = queries(8)
    with grpc.insecure_channel(teacher.address, options=CHANNEL_OPTIONS) as channel:
        stub = teacher_pb2_grpc.TeacherStub(channel)
        stream = stub.Score(
            iter([request_of(score_query, str(n)) for n, score_query in enumerate(score_queries)])
        )
        while info(stub).load.queued_tokens < 40:  # until two requests have been read
            time.sleep(0.01)
        teacher.send(signal.SIGTERM)
        for address in (teacher.address, f"localhost:{teacher.port}"):
            assert isinstance(refusal(address), Unavailable)
        answered = [chunk.last for chunk in stream]
        assert len(answered) >= 2
        assert all(answered)
    assert teacher.process.wait(WAIT) == 0


def test_two_replicas_are_replaced_one_by_one_without_a_fault(start_teacher: StartTeacher) -> None:
    """A rolling restart under load: no call of the client fails."""
    teachers = [start_teacher(*slow(10)) for _ in range(2)]
    score_queries = queries(600)
    with TeacherClient([teacher.address for teacher in teachers]) as client:
        answers = [client.submit(query) for query in score_queries]
        for number, at in ((0, 100), (1, 300)):
            answers[at].result(WAIT)
            assert teachers[number].stop() == 0
            teachers[number] = start_teacher(*slow(10), port=teachers[number].port)
        expected = FakeEngine(FakeSettings(vocab=64)).score(score_queries)
        for answer, block in zip(answers, expected, strict=True):
            assert isinstance(block, RowBlock)
            assert answer.result(WAIT).head_logprobs.tobytes() == block.head_logprobs.tobytes()
