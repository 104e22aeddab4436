"""S8 and the limits: large, compressed or invalid messages cost little and reveal nothing."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from protos import distill_pb2, teacher_pb2, teacher_pb2_grpc
from protos.distill_pb2_grpc import DistillStub
from protos.errors import InternalFault, InvalidInput, WrongState
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_MESSAGE_BYTES
from tests.security.conftest import Secrets
from tests.security.processes import Program, server, teacher
from tests.security.test_access import CONFIG, SERVER_METHODS, TEACHER_METHODS, bearer, call

_PEAK = "VmHWM:"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    directory = tmp_path_factory.mktemp("open")
    with server(directory / "runs") as jobs, teacher(directory / "teacher.log") as scores:
        yield jobs, scores


def peak_bytes(program: Program) -> int:
    status = Path(f"/proc/{program.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(_PEAK)]
    return int(line.split()[1]) << 10


def error_text(error: grpc.RpcError) -> str:
    """Return all text that the caller received."""
    rpc_error: Any = error
    return f"{rpc_error.details()} {rpc_error.trailing_metadata()}"


def test_messages_that_are_too_large_or_packed_tightly(services: tuple[Program, Program]) -> None:
    jobs, scores = services
    bytes_before = peak_bytes(jobs), peak_bytes(scores)
    unbounded = [("grpc.max_send_message_length", -1)]
    packings = (grpc.Compression.NoCompression, grpc.Compression.Gzip)
    for size, packing in itertools.product((MAX_MESSAGE_BYTES + 1, 96 << 20), packings):
        with grpc.insecure_channel(jobs.address, options=unbounded) as channel:
            request = distill_pb2.SubmitJobRequest(config_json="x" * size)
            with pytest.raises(grpc.RpcError) as caught:
                DistillStub(channel).SubmitJob(request, timeout=60, compression=packing)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with grpc.insecure_channel(scores.address, options=unbounded) as channel:
            query = teacher_pb2.ScoreRequest(token_ids=bytes(size))
            stub = teacher_pb2_grpc.TeacherStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Score(iter([query]), timeout=60, compression=packing))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    growth = peak_bytes(jobs) - bytes_before[0], peak_bytes(scores) - bytes_before[1]
    print(f"\npeak memory grew by {[size >> 20 for size in growth]} MiB")
    assert max(growth) < 50 << 20


def test_metadata_that_is_too_large(services: tuple[Program, Program]) -> None:
    for program in services:
        with grpc.insecure_channel(program.address) as channel:
            answer = call(channel, "/grpc.health.v1.Health/Check", [("x", "y" * 20_000)])
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert call(channel, "/grpc.health.v1.Health/Check", []).code is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "garbage", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 50_000, bytes(range(255, 0, -1))]
)
def test_messages_that_are_none(services: tuple[Program, Program], garbage: bytes) -> None:
    """Every method refuses invalid messages without a traceback in the log."""
    jobs, scores = services
    for program, methods in ((jobs, SERVER_METHODS), (scores, TEACHER_METHODS)):
        size = len(program.log.read_text())
        with grpc.insecure_channel(program.address) as channel:
            for method in methods:
                stream = channel.stream_stream(method)(iter([garbage]), timeout=20)
                with pytest.raises(grpc.RpcError) as caught:
                    list(stream)
                fault = fault_of(caught.value, "server")
                # The fake engine refuses all pushed weights.
                refusal = WrongState if method.endswith("PushWeights") else InvalidInput
                assert isinstance(fault, refusal), (method, caught.value)
        assert len(program.log.read_text()) == size


WITHOUT_DATABASE = ("BeginUpload", "SendFiles")


def test_defects_are_told_as_an_id(tmp_path: Path) -> None:
    """With a database without tables, the error contains no names, queries or paths."""
    with server(tmp_path / "runs") as program:
        with contextlib.closing(sqlite3.connect(tmp_path / "runs" / "server.sqlite")) as database:
            database.execute("PRAGMA foreign_keys = OFF")
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in [row for row in tables if not row[0].startswith("sqlite_")]:
                database.execute(f"DROP TABLE {name}")
        with grpc.insecure_channel(program.address) as channel:
            for method in SERVER_METHODS:
                if method.endswith(WITHOUT_DATABASE):
                    continue
                stream = channel.stream_stream(method)(iter([request_of(method)]), timeout=20)
                with pytest.raises(grpc.RpcError) as caught:
                    list(stream)
                fault = fault_of(caught.value, "server")
                assert isinstance(fault, InternalFault), method
                error_id = fault.message.removeprefix("internal error ")
                assert error_id in program.log.read_text()
                text = error_text(caught.value)
                assert str(tmp_path) not in text
                assert not any(
                    word in text for word in ("Trace", "qlite", "SELECT", "table", ".py")
                )
        assert "no such table" in program.log.read_text()


def request_of(method: str) -> bytes:
    """Return a request that gets as far as the database."""
    if method.endswith(("SubmitJob", "CheckJob")):
        config = CONFIG.model_dump_json()
        return distill_pb2.SubmitJobRequest(config_json=config).SerializeToString()
    if method.endswith("SubmitJobs"):
        job_request = distill_pb2.SubmitJobRequest(config_json=CONFIG.model_dump_json())
        return distill_pb2.SubmitJobsRequest(jobs=[job_request]).SerializeToString()
    if method.endswith("ListJobs"):
        return b""
    # In all other requests the first field is the job's id.
    return distill_pb2.GetJobRequest(job_id="some-job").SerializeToString()


def test_tokens_are_in_no_log_and_no_process_list(tmp_path: Path, tokens: Secrets) -> None:
    """Valid and invalid tokens, from a file and from the environment, on both services."""
    wrong_token = secrets.token_urlsafe(32)
    all_tokens = [tokens.read, tokens.submit, tokens.admin, wrong_token]
    from_environment = {"DISTILL_TOKENS": f"admin {tokens.admin}\nread {tokens.read}"}
    with (
        server(tmp_path / "runs", variables=from_environment, launched=True) as jobs,
        teacher(tmp_path / "log", "--token-file", tokens.file, launched=True) as scores,
    ):
        for program, methods in ((jobs, SERVER_METHODS), (scores, TEACHER_METHODS)):
            with grpc.insecure_channel(program.address) as channel:
                for method in methods:
                    for token in all_tokens:
                        answer = call(channel, method, bearer(token))
                        answer_text = f"{answer.text} {answer.trailers}"
                        assert not any(token in answer_text for token in all_tokens)
        command_lines = [
            " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
        ]
        assert any(str(tokens.file) in line for line in command_lines)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {jobs.log, scores.log} <= set(files)
        for token in all_tokens:
            assert not any(token in line for line in command_lines)
            assert not any(token.encode() in path.read_bytes() for path in files)
