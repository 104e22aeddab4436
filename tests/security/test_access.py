"""S1: access to every method that the protos declare, on a real server and a real teacher."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.client import DistillClient
from clients.teacher.client import TeacherClient
from protos import distill_pb2, rollouts_pb2, teacher_pb2, teacher_pb2_grpc
from protos.auth.access import REQUIRED_ROLES, AccessControl, Role, Tokens
from protos.errors import ExitCode, Forbidden, Unauthenticated
from protos.rpc.statuses import ErrorBoundary, fault_of
from tests.security.conftest import Secrets
from tests.security.processes import Program

Metadata = Sequence[tuple[str, str | bytes]]
CONFIG = OnPolicyJob(student=StudentConfig(model="tiny"), data=DataConfig(path="prompts.jsonl"))
HEADER = teacher_pb2.WeightsHeader(mode=teacher_pb2.WEIGHTS_MODE_REPLACE)
# Requests of methods with an effect; the other methods get an empty message.
REQUESTS = {
    "SubmitJob": distill_pb2.SubmitJobRequest(config_json=CONFIG.model_dump_json()),
    "Score": teacher_pb2.ScoreRequest(token_ids=bytes(16), start=1, top_k=2, temperature=1),
    "PushWeights": teacher_pb2.WeightsPart(header=HEADER),
}


def methods_of(file: FileDescriptor) -> Iterator[str]:
    for service in file.services_by_name.values():
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}"


SERVER_METHODS = sorted(methods_of(distill_pb2.DESCRIPTOR))
TEACHER_METHODS = sorted(methods_of(teacher_pb2.DESCRIPTOR))
ROLLOUT_METHODS = sorted(methods_of(rollouts_pb2.DESCRIPTOR))


@dataclass(frozen=True)
class Answer:
    """The outcome of a call, and its trailers."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, str | bytes], ...]


def call(channel: grpc.Channel, method: str, metadata: Metadata) -> Answer:
    """Make one call with `metadata`. To gRPC, every call is a stream of messages each way."""
    message = REQUESTS.get(method.rpartition("/")[2])
    stream = channel.stream_stream(method)(
        iter([message.SerializeToString() if message else b""]), metadata=metadata, timeout=20
    )
    try:
        list(itertools.islice(stream, 1))
        stream.cancel()
        return Answer(grpc.StatusCode.OK, "", ())
    except grpc.RpcError as error:
        rpc_error: Any = error
        trailers = tuple((key, value) for key, value in rpc_error.trailing_metadata())
        return Answer(rpc_error.code(), rpc_error.details(), trailers)


def bearer(token: str) -> Metadata:
    return [("authorization", f"Bearer {token}")]


def wrong_metadata(tokens: Secrets) -> dict[str, Metadata]:
    changed = "A" if tokens.admin[0] != "A" else "B"
    return {
        "none": [],
        "empty": [("authorization", "")],
        "empty bearer": bearer(""),
        "wrong": bearer(secrets.token_urlsafe(32)),
        "first byte": bearer(changed + tokens.admin[1:]),
        "last byte": bearer(tokens.admin[:-1] + "="),
        "prefix": bearer(tokens.admin[:-1]),
        "longer": bearer(tokens.admin + "A"),
        "oversized": bearer(tokens.admin + "A" * 4000),
        "twice": [*bearer(tokens.admin), *bearer(tokens.admin)],
        "wrong, then right": [*bearer("x" * 43), *bearer(tokens.admin)],
        "no scheme": [("authorization", tokens.admin)],
        "other scheme": [("authorization", f"Basic {tokens.admin}")],
        "two spaces": [("authorization", f"Bearer  {tokens.admin}")],
        "other key": [("x-authorization", f"Bearer {tokens.admin}")],
        "binary": [("authorization-bin", f"Bearer {tokens.admin}".encode())],
    }


def test_the_table_names_every_method_and_no_other() -> None:
    assert len(SERVER_METHODS) >= 8
    assert len(TEACHER_METHODS) >= 4
    assert len(ROLLOUT_METHODS) >= 2
    public = {method for method, role in REQUIRED_ROLES.items() if role is None}
    assert set(REQUIRED_ROLES) - public == {*SERVER_METHODS, *TEACHER_METHODS, *ROLLOUT_METHODS}
    assert public == {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    assert public <= set(methods_of(health_pb2.DESCRIPTOR))


def test_nobody_without_a_token_gets_in(
    guarded_server: Program, guarded_teacher: Program, tokens: Secrets
) -> None:
    answers = []
    for program, methods in ((guarded_server, SERVER_METHODS), (guarded_teacher, TEACHER_METHODS)):
        # Also methods that are not served here: callers without a token do not learn which ones
        # are.
        unknown = ["/distill.v1.Teacher/Nothing", "/x.Y/Z", "/grpc.health.v1.Health/List"]
        with grpc.insecure_channel(program.address) as channel:
            for method in [*SERVER_METHODS, *TEACHER_METHODS, *ROLLOUT_METHODS, *unknown]:
                for name, metadata in wrong_metadata(tokens).items():
                    answers.append((f"{method} {name}", call(channel, method, metadata)))
            assert {call(channel, method, []).text for method in methods}
    different_answers = {answer for _, answer in answers}
    print(
        f"\n{len(answers)} calls without a good token, {len(different_answers)} different answer(s)"
    )
    assert len(different_answers) == 1, different_answers
    assert different_answers.pop().code is grpc.StatusCode.UNAUTHENTICATED


def test_nothing_happened(
    guarded_server: Program,
    guarded_teacher: Program,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls without a valid token leave no job, score nothing and push no weights."""
    for program, method in (
        (guarded_server, "/distill.v1.Distill/SubmitJob"),
        (guarded_teacher, "/distill.v1.Teacher/Score"),
        (guarded_teacher, "/distill.v1.Teacher/PushWeights"),
    ):
        with grpc.insecure_channel(program.address) as channel:
            for metadata in wrong_metadata(tokens).values():
                assert call(channel, method, metadata).code is grpc.StatusCode.UNAUTHENTICATED
    monkeypatch.setenv("DISTILL_TOKEN", tokens.read)
    with DistillClient(guarded_server.address) as client:
        assert client.list() == []
    monkeypatch.setenv("DISTILL_TEACHER_TOKEN", tokens.read)
    with grpc.insecure_channel(guarded_teacher.address) as channel:
        info = teacher_pb2_grpc.TeacherStub(channel).GetInfo(
            teacher_pb2.GetInfoRequest(), timeout=20, metadata=tuple(bearer(tokens.read))
        )
    assert (info.version, info.load.scored_tokens) == (0, 0)


@pytest.mark.parametrize("role", Role)
def test_a_role_may_do_what_the_table_says(
    guarded_server: Program, guarded_teacher: Program, tokens: Secrets, role: Role
) -> None:
    metadata = bearer(getattr(tokens, role.name.lower()))
    for program, methods in ((guarded_server, SERVER_METHODS), (guarded_teacher, TEACHER_METHODS)):
        with grpc.insecure_channel(program.address) as channel:
            for method in methods:
                required_role = REQUIRED_ROLES[method]
                assert required_role is not None
                if method.endswith("SubmitJob") and role >= required_role:
                    continue  # the call would create a job
                answer = call(channel, method, metadata)
                is_denied = answer.code is grpc.StatusCode.PERMISSION_DENIED
                assert is_denied == (role < required_role), (method, answer)
                assert answer.code is not grpc.StatusCode.UNAUTHENTICATED


def test_probes_need_no_token(guarded_server: Program, guarded_teacher: Program) -> None:
    for program in (guarded_server, guarded_teacher):
        with grpc.insecure_channel(program.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("metadata", [[], [("authorization", f"Bearer {'a' * 43}")]])
def test_a_method_that_is_not_in_the_table_is_open_to_nobody(metadata: Metadata) -> None:
    """Without tokens, and for an administrator."""
    served_calls = []

    async def serve_forgotten(messages: Any, context: Any) -> Any:
        served_calls.append(messages)
        yield b""

    async def call_forgotten() -> Answer:
        tokens = Tokens({"a" * 43: Role.ADMIN} if metadata else {})
        server = grpc.aio.server(interceptors=[ErrorBoundary(), AccessControl(tokens)])
        handlers = {"Forgotten": grpc.stream_stream_rpc_method_handler(serve_forgotten)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x.Y", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = await asyncio.to_thread(call, channel, "/x.Y/Forgotten", metadata)
        await server.stop(None)
        return answer

    assert asyncio.run(call_forgotten()).code is grpc.StatusCode.PERMISSION_DENIED
    assert served_calls == []


def test_clients_bring_tokens_and_say_what_was_refused(
    guarded_server: Program,
    guarded_teacher: Program,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DistillClient(guarded_server.address) as client:
        with pytest.raises(Unauthenticated, match="needs a valid token") as caught:
            client.list()
        assert caught.value.exit_code is ExitCode.REFUSED
    monkeypatch.setenv("DISTILL_TOKEN_FILE", str(tokens.file.with_name("mine")))
    tokens.file.with_name("mine").touch(0o600)
    tokens.file.with_name("mine").write_text(tokens.read + "\n")
    with DistillClient(guarded_server.address) as client:
        assert client.list() == []
        with pytest.raises(Forbidden, match="role read may not call SubmitJob"):
            client.submit(CONFIG)
    with TeacherClient(guarded_teacher.address) as teacher, pytest.raises(Unauthenticated):
        teacher.info()
    monkeypatch.setenv("DISTILL_TEACHER_TOKEN", tokens.read)
    with TeacherClient(guarded_teacher.address) as teacher:
        assert teacher.info().vocab_size == 64


def test_a_refusal_is_a_fault_like_any_other(guarded_server: Program) -> None:
    with grpc.insecure_channel(guarded_server.address) as channel:
        method = channel.unary_unary("/distill.v1.Distill/ListJobs")
        with pytest.raises(grpc.RpcError) as caught:
            method(b"", timeout=20)
    fault = fault_of(caught.value, "server")
    assert isinstance(fault, Unauthenticated)
    assert "DISTILL_TOKEN" in fault.hint
