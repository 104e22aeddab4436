"""Errors keep category, field and hint across the wire; defects stay secret; SIGTERM drains."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import InternalFault, InvalidInput, NotFound, Overloaded, Unavailable
from protos.rpc.server import ServerEndpoint
from protos.rpc.statuses import _abort_call, fault_of
from protos.rpc.transport import CHANNEL_OPTIONS, SERVER_OPTIONS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.protos.rpc.stub_server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield process, process.stdout.readline().split()[-1]
        process.kill()


@pytest.fixture
def channel(server: tuple[subprocess.Popen[str], str]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server[1], options=CHANNEL_OPTIONS) as channel:
        yield channel


def test_a_fault_keeps_category_field_and_hint(channel: grpc.Channel) -> None:
    stub = teacher_pb2_grpc.TeacherStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=10)
    fault = fault_of(caught.value, "teacher")
    assert isinstance(fault, InvalidInput)
    assert fault.message == "it is too long: \u00e9"
    assert (fault.field, fault.hint) == ("name[3]", "shorten it")


def test_a_call_that_the_server_does_not_have(channel: grpc.Channel) -> None:
    """A client that is newer than its server calls such a method."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/distill.v1.Teacher/FutureCall")(b"", timeout=10)
    fault = fault_of(caught.value, "teacher")
    assert fault.message == "the teacher does not have this method"
    assert fault.hint == "check that client and server have the same version"


def test_overload_says_when_to_come_again(channel: grpc.Channel) -> None:
    stub = teacher_pb2_grpc.TeacherStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.PushWeights(iter([]), timeout=10)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(fault_of(error, "teacher"), Overloaded)
    data = dict(error.trailing_metadata())["grpc-status-details-bin"]
    retry = error_details_pb2.RetryInfo()
    assert status_pb2.Status.FromString(data).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == Overloaded.retry_after_ms == 1000


def test_a_fault_survives_its_own_length() -> None:
    """Trailers of more than 8 KiB are dropped, and the caller would get an error about them
    instead.
    """
    text = "\u00e9" * 50_000
    fault = InvalidInput(text, field=text, hint=text)
    context = AsyncMock()
    asyncio.run(_abort_call(context, fault, "a test"))
    _, message = context.abort.await_args.args
    [(_, details)] = context.abort.await_args.kwargs["trailing_metadata"]
    assert message.startswith("\u00e9" * 400)
    assert 3 * len(message.encode()) + len(details) < 8 << 10


def test_a_defect_is_an_id_for_the_caller_and_a_traceback_for_the_log(
    server: tuple[subprocess.Popen[str], str], channel: grpc.Channel
) -> None:
    stub = teacher_pb2_grpc.TeacherStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.GetVocabulary(teacher_pb2.GetVocabularyRequest(), timeout=10))
    fault = fault_of(caught.value, "teacher")
    assert isinstance(fault, InternalFault)
    assert "secret" not in str(caught.value)
    process, _ = server
    process.terminate()
    _, log = process.communicate(timeout=20)
    assert "a secret of the server" in log
    assert fault.message.split()[-1] in log


def test_sigterm_lets_a_running_stream_end(
    server: tuple[subprocess.Popen[str], str], channel: grpc.Channel
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    check = health_pb2.HealthCheckRequest(service="distill.v1.Teacher")
    assert health.Check(check, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    stub = teacher_pb2_grpc.TeacherStub(channel)
    stream = stub.Score(iter([teacher_pb2.ScoreRequest(start=20)]), timeout=20)
    received = [next(stream) for _ in range(3)]
    server[0].send_signal(signal.SIGTERM)
    received.extend(stream)
    assert [chunk.first_position for chunk in received] == list(range(20))
    assert server[0].wait(20) == 0


def test_every_watcher_of_the_health_is_told_and_let_go(
    server: tuple[subprocess.Popen[str], str], channel: grpc.Channel
) -> None:
    health = health_pb2_grpc.HealthStub(channel)

    def check_request(name: str) -> Any:
        return health_pb2.HealthCheckRequest(service=name)

    status = health_pb2.HealthCheckResponse
    names = ["", "distill.v1.Teacher", "distill.v1.Teacher", "no.such.Service"]
    watches = [health.Watch(check_request(name), timeout=20) for name in names]
    first_statuses = [next(watch).status for watch in watches]
    assert first_statuses == [status.SERVING] * 3 + [status.SERVICE_UNKNOWN]
    watches[1].cancel()
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(check_request("no.such.Service"), timeout=10)
    assert isinstance(fault_of(caught.value, "teacher"), NotFound)
    server[0].send_signal(signal.SIGTERM)
    for watch in (watches[0], *watches[2:]):
        assert [message.status for message in watch] == [status.NOT_SERVING]
    assert server[0].wait(5) == 0


def test_nobody_listens() -> None:
    with grpc.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as channel:
        stub = teacher_pb2_grpc.TeacherStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=10)
    assert isinstance(fault_of(caught.value, "teacher"), Unavailable)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_only_loopback(host: str) -> None:
    with pytest.raises(InvalidInput):
        ServerEndpoint(host).require_usable()


def test_a_call_that_the_server_cancels_may_be_repeated() -> None:
    """gRPC cancels a call that reaches a server while it closes its port."""

    def cancel_call(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.cancel()
        return request

    handler = grpc.unary_unary_rpc_method_handler(cancel_call)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a", {"b": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        error = channel.unary_unary("/a/b").future(b"", timeout=20).exception()
    server.stop(0)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert isinstance(fault_of(error, "teacher"), Unavailable)


class SilentTeacher(teacher_pb2_grpc.TeacherServicer):
    """Sends its first message after `SECONDS`."""

    SECONDS = 6.0

    async def Score(self, request_iterator: Any, context: Any) -> Any:
        await asyncio.sleep(self.SECONDS)
        yield teacher_pb2.ScoreChunk(first_position=7)


def test_a_silent_call_is_not_cut_by_pings() -> None:
    """All times are divided by 30: the call stands for one that is silent for three minutes."""
    times = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")

    def scale_times(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(name, value // 30 if name in times else value) for name, value in options]

    async def call_silent_teacher() -> int:
        server = grpc.aio.server(options=scale_times(SERVER_OPTIONS))
        teacher_pb2_grpc.add_TeacherServicer_to_server(SilentTeacher(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        options = scale_times(CHANNEL_OPTIONS)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                stream = teacher_pb2_grpc.TeacherStub(channel).Score()
                await stream.write(teacher_pb2.ScoreRequest())
                chunk = await stream.read()
        finally:
            await server.stop(0)
        return int(chunk.first_position)

    assert asyncio.run(call_silent_teacher()) == 7
