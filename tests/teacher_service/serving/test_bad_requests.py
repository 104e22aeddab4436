"""T9, T10 and T16: whatever a request holds, it is answered or refused by name, and the teacher
lives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.teacher.pending_answer import RowAssembly
from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from protos.rpc.transport import CHANNEL_OPTIONS
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.validation import RequestLimits, parse_request
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.processes import TeacherProcess

REPEATS = int(os.environ.get("DISTILL_REPEATS", "3"))
VOCAB, MAX_LENGTH = 100, 64
LIMITS = RequestLimits(VOCAB, MAX_LENGTH, VOCAB)
FAKE = ["--engine", "fake", "--model", f"vocab={VOCAB},max_length={MAX_LENGTH}"]
WAIT = 60.0
BATCH = 100

_BAD_IDS = [-1, VOCAB, 2**31 - 1, -(2**31), 151_936]
_BAD_COUNTS = [0, 1, 2**31, 2**32 - 1]
_BAD_FLOATS = [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")]


def good_request(rng: np.random.Generator) -> teacher_pb2.ScoreRequest:
    length = int(rng.integers(2, MAX_LENGTH + 1))
    start = int(rng.integers(1, length))
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    k = int(rng.integers(1, 9))
    if rng.random() < 0.5:
        return request_of(ScoreQuery(tokens, start, top_k=k), "good")
    offsets = rng.integers(0, VOCAB, (length - start, 1))
    head = ((offsets + np.arange(k)) % VOCAB).astype(np.int32)
    return request_of(ScoreQuery(tokens, start, head_ids=head), "good")


def spoil(request: teacher_pb2.ScoreRequest, rng: np.random.Generator) -> None:
    """Break one thing, so that the request cannot be right."""
    tokens = np.frombuffer(request.token_ids, "<i4").copy()
    match int(rng.integers(9)):
        case 0:
            tokens[rng.integers(len(tokens))] = rng.choice(_BAD_IDS)
            request.token_ids = tokens.tobytes()
        case 1:
            request.token_ids = request.token_ids[: -int(rng.integers(1, 4))]
        case 2:
            count = int(rng.choice([0, 1, MAX_LENGTH + 1, 5000]))
            request.token_ids = np.zeros(count, "<i4").tobytes()
        case 3:
            request.start = int(rng.choice([0, len(tokens), len(tokens) + 1, 2**31, 2**32 - 1]))
        case 4:
            request.top_k = int(rng.choice([0, VOCAB + 1, 2**31, 2**32 - 1]))
        case 5:
            rows = len(tokens) - request.start
            head = np.zeros((rows, 2), "<i4")
            if rng.random() < 0.5:
                head[:, 1] = 1
                head[rng.integers(rows), rng.integers(2)] = rng.choice(_BAD_IDS)
            request.head_ids = head.tobytes()
        case 6:
            request.head_ids = rng.bytes(int(rng.choice([0, 1, 3, 5, 401])))
            if not len(request.head_ids) % 4:
                request.head_ids = b""
        case 7:
            request.temperature = float(rng.choice(_BAD_FLOATS))
        case _:
            request.next_position = int(rng.choice([len(tokens), 2**31, 2**32 - 1]))
    if rng.random() < 0.1:
        request.request_id = "x" * int(rng.choice([201, 5000]))


def bad_requests(seed: int, count: int) -> list[teacher_pb2.ScoreRequest]:
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        request = good_request(rng)
        request.request_id = f"bad {number}"
        spoil(request, rng)
        requests.append(request)
    return requests


@settings(max_examples=REPEATS * 50, deadline=None, database=None)
@given(st.integers(0, 2**63))
def test_every_bad_request_is_refused_by_name(seed: int) -> None:
    """T9, T10: 20 x 50 examples of a hundred requests are 10^5."""
    for request in bad_requests(seed, BATCH):
        with pytest.raises(InvalidInput) as caught:
            parse_request(request, LIMITS)
        assert caught.value.field
        assert caught.value.hint


@settings(max_examples=REPEATS * 10, deadline=None, database=None)
@given(st.integers(0, 2**63))
def test_changed_bytes_are_a_request_or_none(seed: int) -> None:
    """T16 in process: parsing and validation of messages with random changes."""
    rng = np.random.default_rng(seed)
    for _ in range(BATCH):
        try:
            request = teacher_pb2.ScoreRequest.FromString(changed(good_request(rng), rng))
        except DecodeError:
            continue
        try:
            query = parse_request(request, LIMITS)
        except InvalidInput:
            continue
        assert 2 <= len(query.token_ids) <= MAX_LENGTH
        assert 0 <= query.token_ids.min() <= query.token_ids.max() < VOCAB
        assert 1 <= query.k <= VOCAB


def changed(message: Any, rng: np.random.Generator) -> bytes:
    data = bytearray(message.SerializeToString())
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data) + 1))
        match int(rng.integers(4)):
            case 0 if at < len(data):
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del data[at : at + int(rng.integers(1, 9))]
            case _:
                data = data[:at] if rng.random() < 0.2 else data + data[:at]
    return bytes(data)


@pytest.fixture
def teacher(start_teacher: StartTeacher) -> TeacherProcess:
    return start_teacher(*FAKE, launched=True)


@pytest.fixture
def channel(teacher: TeacherProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(teacher.address, options=CHANNEL_OPTIONS) as channel:
        yield channel


def test_bad_requests_among_good_ones(
    teacher: TeacherProcess, channel: grpc.Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """T9 over gRPC: thousands on one stream, and the good ones between them get their rows."""
    count = 150 * REPEATS
    bad = bad_requests(0, count)
    good = [good_request(np.random.default_rng(seed)) for seed in range(count // 10)]
    for number, request in enumerate(good):
        request.request_id = f"good {number}"
    requests = [r for n, request in enumerate(good) for r in (*bad[10 * n : 10 * n + 10], request)]
    exact = FakeEngine(FakeSettings(vocab=VOCAB, max_length=MAX_LENGTH))
    codes: dict[str, int] = {}
    answered = 0
    pid = teacher.process.pid
    for chunk in teacher_pb2_grpc.TeacherStub(channel).Score(iter(requests), timeout=WAIT):
        if chunk.HasField("error"):
            assert not chunk.request_id.startswith("good")
            assert chunk.error.field
            assert chunk.error.hint
            codes[chunk.error.code] = codes.get(chunk.error.code, 0) + 1
            continue
        query = parse_request(good[int(chunk.request_id.split()[1])], LIMITS)
        [expected] = exact.score([query])
        assert isinstance(expected, RowBlock)
        block = RowAssembly(query).add(chunk, VOCAB)
        assert block is not None
        half = expected.head_logprobs.astype(np.float16)
        np.testing.assert_array_equal(block.head_logprobs.astype(np.float16), half)
        answered += 1
    with capsys.disabled():
        print(f"\nT9: {codes}, {answered} good ones exact")
    assert codes == {"INVALID_ARGUMENT": count}
    assert answered == len(good)
    assert teacher.process.poll() is None
    assert psutil.Process(pid).is_running()
    assert teacher.stop() == 0
    assert "defect" not in teacher.log.read_text()


def test_lengths_at_the_limits(channel: grpc.Channel) -> None:
    """T10: 0, 1, 2, the longest, one more, a million tokens."""
    stub = teacher_pb2_grpc.TeacherStub(channel)

    def ask(length: int) -> list[teacher_pb2.ScoreChunk]:
        request = teacher_pb2.ScoreRequest(
            token_ids=bytes(4 * length), start=1, top_k=VOCAB, temperature=1
        )
        return list(stub.Score(iter([request]), timeout=WAIT))

    for length in (2, MAX_LENGTH):
        assert sum(chunk.count for chunk in ask(length)) == length - 1
    for length in (0, 1, MAX_LENGTH + 1, 1_000_000):
        [refused] = ask(length)
        assert (refused.error.code, refused.error.field) == ("INVALID_ARGUMENT", "token_ids")
    with pytest.raises(grpc.RpcError) as caught:
        ask(1_100_000)  # more than a message of 4 MiB
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert ask(2)


ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}


def test_bytes_that_are_no_messages(
    teacher: TeacherProcess, channel: grpc.Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """T16: changed and random bytes to every method; no crash, no hang, no leak, no defect."""
    rng = np.random.default_rng(0)
    methods = {
        "GetInfo": (channel.unary_unary, lambda: teacher_pb2.GetInfoRequest()),
        "GetVocabulary": (channel.unary_stream, lambda: teacher_pb2.GetVocabularyRequest()),
        "Score": (channel.stream_stream, lambda: good_request(rng)),
        "PushWeights": (channel.stream_unary, lambda: weights_header(rng)),
    }
    process = psutil.Process(teacher.process.pid)
    slowest, statuses, grown = 0.0, {}, 0
    for round_number in range(10 * REPEATS):
        for name, (kind, message) in methods.items():
            data = changed(message(), rng)
            if rng.random() < 0.2:
                data = rng.bytes(int(rng.integers(200)))
            start = time.monotonic()
            code = status_of(kind(f"/distill.v1.Teacher/{name}"), name, data)
            slowest = max(slowest, time.monotonic() - start)
            statuses[code] = statuses.get(code, 0) + 1
        if round_number == REPEATS:
            grown = -process.memory_info().rss
    grown += process.memory_info().rss
    with capsys.disabled():
        status_counts = {code.name: count for code, count in statuses.items()}
        print(f"\nT16: {status_counts}, slowest {1000 * slowest:.0f} ms, {grown >> 20} MiB more")
    assert statuses.keys() <= ALLOWED
    assert slowest < 1
    assert grown < 100 << 20
    assert teacher.stop() == 0
    assert "defect" not in teacher.log.read_text()


def weights_header(rng: np.random.Generator) -> teacher_pb2.WeightsPart:
    spec = teacher_pb2.TensorSpec(name="a", shape=[2, 3], dtype="float32")
    header = teacher_pb2.WeightsHeader(mode=1, tensors=[spec], total_bytes=24)
    return teacher_pb2.WeightsPart(header=header)


def status_of(call: Any, name: str, data: bytes) -> grpc.StatusCode:
    streams = name in ("Score", "PushWeights")
    try:
        answer = call(iter([data]) if streams else data, timeout=10)
        if name in ("GetVocabulary", "Score"):
            for chunk in answer:
                error = teacher_pb2.ScoreChunk.FromString(chunk).error if name == "Score" else None
                assert error is None or error.code in ("", "INVALID_ARGUMENT")
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    return grpc.StatusCode.OK
