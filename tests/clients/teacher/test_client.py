"""The client against real teachers that are killed, stopped, replaced and frozen."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import fields
from typing import NoReturn

import grpc
import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos import teacher_pb2_grpc
from protos.errors import Corrupt, InternalFault, InvalidInput, Unavailable, WrongState
from protos.rows.codec import RowBlock
from student_trainer.teachers import stop_watch
from teacher_service.engines.fake import FakeEngine, FakeSettings
from tests.teacher_service.conftest import StartTeacher

VOCAB = 64
WAIT = 60.0


def fake_engine_options(**settings: int) -> list[str]:
    pairs = ",".join(f"{name}={value}" for name, value in {"vocab": VOCAB, **settings}.items())
    return ["--engine", "fake", "--model", pairs]


def make_queries(count: int, length: int = 40, seed: int = 0) -> list[ScoreQuery]:
    rng = np.random.default_rng(seed)
    score_queries = []
    for number in range(count):
        tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        if number % 2:
            tail_draws = {"tail_samples": 3, "seed": seed} if number % 4 == 1 else {}
            score_queries.append(ScoreQuery(tokens, 3, top_k=4, f32=True, **tail_draws))
        else:
            head = np.argsort(rng.random((length - 3, VOCAB)))[:, :4].astype(np.int32)
            score_queries.append(ScoreQuery(tokens, 3, head_ids=head, f32=True))
    return score_queries


def assert_undisturbed(
    sent_queries: Sequence[ScoreQuery], answers: Sequence[Future[RowBlock]]
) -> None:
    """Every answer has exactly the rows of an engine without interruptions."""
    expected_blocks = FakeEngine(FakeSettings(vocab=VOCAB)).score(sent_queries)
    for answer, block in zip(answers, expected_blocks, strict=True):
        assert isinstance(block, RowBlock)
        rows = answer.result(WAIT)
        for column in fields(RowBlock):
            values, expected_values = getattr(rows, column.name), getattr(block, column.name)
            np.testing.assert_array_equal(values, expected_values)


def test_info_vocabulary_and_rows(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options())
    with TeacherClient(teacher.address) as client:
        info = client.info()
        assert (info.engine, info.vocab_size, info.max_top_k) == ("fake", VOCAB, VOCAB)
        tokens = client.vocabulary()
        assert tokenizer_fingerprint(tokens) == info.tokenizer_fingerprint
        sent_queries = make_queries(50)
        assert_undisturbed(sent_queries, [client.submit(query) for query in sent_queries])


def test_many_queries_in_one_call(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options())
    sent_queries = make_queries(50)
    expected_blocks = FakeEngine(FakeSettings(vocab=VOCAB)).score(sent_queries)
    with TeacherClient(teacher.address) as client:
        in_order = client.score(iter(sent_queries))
        as_they_come = dict(client.as_completed(sent_queries))
        assert sorted(as_they_come) == list(range(50))
        for number, block in enumerate(expected_blocks):
            assert isinstance(block, RowBlock)
            for rows in (in_order[number], as_they_come[number]):
                np.testing.assert_array_equal(rows.head_logprobs, block.head_logprobs)
                np.testing.assert_array_equal(rows.token_logprobs, block.token_logprobs)
        assert client.score([]) == []


def test_the_first_error_ends_a_call(start_teacher: StartTeacher) -> None:
    """The slow teacher has not finished the other queries when the bad query is refused."""
    teacher = start_teacher(*fake_engine_options(latency_ms=2000))
    bad = ScoreQuery(np.array([1, VOCAB], np.int32), 1, top_k=4)
    with TeacherClient(teacher.address) as client:
        with pytest.raises(InvalidInput, match="must be 0 to 63"):
            client.score([bad, *make_queries(5)])
        with pytest.raises(InvalidInput, match="must be 0 to 63"):
            list(client.as_completed([*make_queries(5), bad]))


def test_a_long_sequence_comes_in_several_messages(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(max_length=20000))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 20000).astype(np.int32)
    # 20,000 rows of 32 x 8 bytes: five messages of a MiB.
    sent_queries = [ScoreQuery(tokens, 1, top_k=32, f32=True)]
    with TeacherClient(teacher.address) as client:
        assert_undisturbed(sent_queries, [client.submit(sent_queries[0])])


@pytest.mark.parametrize(("length", "k"), [(16_401, 64), (32_769, 32)])
def test_head_ids_of_a_long_answer_come_in_parts(
    start_teacher: StartTeacher, length: int, k: int
) -> None:
    """More than 4 MiB of head ids, as for reverse KL of a long answer."""
    teacher = start_teacher(*fake_engine_options(max_length=40_000))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    heads = np.tile(rng.permutation(VOCAB)[:k].astype(np.int32), (length - 1, 1))
    heads = np.roll(heads, 1, axis=1)
    sent_queries = [ScoreQuery(tokens, 1, head_ids=heads, f32=True), *make_queries(5)]
    assert heads.nbytes >= 4 << 20
    with TeacherClient(teacher.address) as client:
        assert_undisturbed(sent_queries, [client.submit(query) for query in sent_queries])


def test_faults_stay_with_their_request(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(nan_token=60, crash_token=61))
    good = make_queries(1)[0]
    tokens = good.token_ids % 50
    good = ScoreQuery(tokens, 3, top_k=4)

    def query_with_token(token: int) -> ScoreQuery:
        return ScoreQuery(np.append(tokens, token).astype(np.int32), 3, top_k=4)

    with TeacherClient(teacher.address) as client:
        sent_queries = [
            good,
            ScoreQuery(tokens, 3, top_k=VOCAB + 1),
            query_with_token(VOCAB),
            ScoreQuery(np.insert(tokens, 5, 60).astype(np.int32), 3, top_k=4),
            query_with_token(61),
            good,
        ]
        answers = [client.submit(query) for query in sent_queries]
        faults = [answer.exception(WAIT) for answer in answers]
    kinds = [None, InvalidInput, InvalidInput, Corrupt, InternalFault, None]
    assert [type(fault) if fault else None for fault in faults] == kinds
    assert isinstance(faults[2], InvalidInput)
    assert faults[2].field == "token_ids[40]"
    assert "internal error" in str(faults[4])
    assert "set to crash" in teacher.log.read_text()


def test_what_cannot_be_sent_is_refused_at_once(start_teacher: StartTeacher) -> None:
    with TeacherClient("127.0.0.1:1") as client:
        tokens = np.zeros(100_000, np.int32)
        with pytest.raises(InvalidInput, match="one request holds"):
            client.submit(ScoreQuery(tokens, 1, head_ids=np.zeros((99_999, 256), np.int32)))
        with pytest.raises(InvalidInput):
            client.submit(ScoreQuery(tokens[:9], -1, top_k=2))


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_teacher_killed_and_restarted(
    start_teacher: StartTeacher, signal_number: signal.Signals
) -> None:
    args = [*fake_engine_options(latency_ms=5), "--max-batch-tokens", "80"]
    teacher = start_teacher(*args)
    sent_queries = make_queries(400)
    with TeacherClient(teacher.address, max_in_flight=64) as client:
        answers = [client.submit(query) for query in sent_queries]
        for answers_before_kill in (60, 200):
            answers[answers_before_kill].result(WAIT)
            teacher.send(signal_number)
            teacher.process.wait(20)
            assert not all(answer.done() for answer in answers)
            teacher = start_teacher(*args, port=teacher.port)
        assert_undisturbed(sent_queries, answers)


def test_many_threads_share_a_client(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options())
    sent_queries = make_queries(120)
    answers: dict[int, Future[RowBlock]] = {}
    with TeacherClient(teacher.address, max_in_flight=8) as client:

        def submit(first_number: int) -> None:
            for number in range(first_number, len(sent_queries), 4):
                answers[number] = client.submit(sent_queries[number])

        threads = [
            threading.Thread(target=submit, args=(first_number,)) for first_number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_undisturbed(sent_queries, [answers[number] for number in range(len(sent_queries))])


def test_a_teacher_gone_for_good_is_given_up_on_time(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(latency_ms=50), "--max-batch-tokens", "40")
    patience = 3.0
    with TeacherClient(teacher.address, patience_seconds=patience) as client:
        answers = [client.submit(query) for query in make_queries(30)]
        answers[0].result(WAIT)
        teacher.kill()
        killed_at = time.monotonic()
        fault = answers[-1].exception(WAIT)
        assert patience * 0.9 < time.monotonic() - killed_at < patience * 10
        assert isinstance(fault, Unavailable)
        assert fault.field == "teacher.address"
        assert "3 s" in fault.message
        # The next query has its own patience and uses a teacher that is back.
        start_teacher(*fake_engine_options(), port=teacher.port)
        assert_undisturbed(make_queries(1), [client.submit(make_queries(1)[0])])


def test_a_frozen_teacher_is_given_up_too(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options())
    with TeacherClient(teacher.address, patience_seconds=2.0) as client:
        client.submit(make_queries(1)[0]).result(WAIT)
        teacher.send(signal.SIGSTOP)
        frozen_at = time.monotonic()
        fault = client.submit(make_queries(1)[0]).exception(WAIT)
        assert time.monotonic() - frozen_at < 20  # ten times its patience
        assert isinstance(fault, Unavailable)
        teacher.send(signal.SIGCONT)
        assert_undisturbed(make_queries(1), [client.submit(make_queries(1)[0])])


def test_a_slow_teacher_is_waited_for_but_not_for_ever(
    start_teacher: StartTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = start_teacher(*fake_engine_options(latency_ms=3000))
    with TeacherClient(teacher.address, patience_seconds=1.0) as client:
        assert_undisturbed(make_queries(3), [client.submit(query) for query in make_queries(3)])

        monkeypatch.setattr("clients.teacher.client._BUSY_FACTOR", 2)
        start_time = time.monotonic()
        fault = client.submit(make_queries(1)[0]).exception(WAIT)
        assert isinstance(fault, Unavailable)
        assert "answers, but has scored nothing for 2 s" in fault.message
        assert 1.8 <= time.monotonic() - start_time < 20  # ten times the limit

        monkeypatch.undo()
        answer = client.submit(make_queries(1)[0])
        time.sleep(1.5)
        assert not answer.done()
        teacher.kill()
        fault = answer.exception(WAIT)
        assert isinstance(fault, Unavailable)
        assert "has not answered for 1 s" in fault.message


def test_a_stop_request_ends_the_wait_for_a_teacher_that_is_away_only(
    start_teacher: StartTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that computes one large batch answers health checks, and gives its rows."""
    monkeypatch.setattr(stop_watch, "STOP_SECONDS", 0.5)
    teacher = start_teacher(*fake_engine_options(latency_ms=4000))
    with TeacherClient(teacher.address, patience_seconds=600) as client:
        stop_watch.end_requests_after_stop(client, lambda: True)
        assert_undisturbed(make_queries(1), [client.submit(make_queries(1)[0])])
        answer = client.submit(make_queries(1)[0])
        teacher.kill()
        fault = answer.exception(WAIT)
    assert isinstance(fault, Unavailable)
    assert "has not answered for 0.5 s, and the job was asked to stop" in fault.message


def test_a_queue_that_moves_is_waited_for(
    start_teacher: StartTeacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its turn comes after twice the limit of a stall, because those of others come first."""
    monkeypatch.setattr("clients.teacher.client._BUSY_FACTOR", 1.5)
    teacher = start_teacher(*fake_engine_options(latency_ms=50), "--max-batch-tokens", "40")
    with (
        TeacherClient(teacher.address) as others,
        TeacherClient(teacher.address, patience_seconds=1.0, background=True) as client,
    ):
        answers = [others.submit(query) for query in make_queries(70)]
        answers[0].result(WAIT)
        assert_undisturbed(make_queries(1), [client.submit(make_queries(1)[0])])
        assert all(answer.done() for answer in answers[:30])
    assert any("scores requests of others: no row for" in message for message in caplog.messages)


def test_a_restarted_teacher_is_found_within_a_second(start_teacher: StartTeacher) -> None:
    """Many refused connections must not lead to a long back-off."""
    teacher = start_teacher(*fake_engine_options())
    with TeacherClient(teacher.address) as client:
        client.submit(make_queries(1)[0]).result(WAIT)
        teacher.kill()
        answer = client.submit(make_queries(1)[0])
        time.sleep(4)
        start_teacher(*fake_engine_options(), port=teacher.port)
        restarted_at = time.monotonic()
        answer.result(WAIT)
        assert time.monotonic() - restarted_at < 12  # ten times its longest back-off


def test_other_weights_after_a_restart_are_refused(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(latency_ms=50), "--max-batch-tokens", "40")
    with TeacherClient(teacher.address) as client:
        old_fingerprint = client.info().fingerprint
        answers = [client.submit(query) for query in make_queries(30)]
        answers[0].result(WAIT)
        teacher.kill()
        start_teacher(*fake_engine_options(seed=1), port=teacher.port)
        fault = answers[-1].exception(WAIT)
        assert isinstance(fault, WrongState)
        assert old_fingerprint in fault.message
        assert isinstance(client.submit(make_queries(1)[0]).exception(WAIT), WrongState)


def test_nobody_there() -> None:
    start_time = time.monotonic()
    with TeacherClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            client.info()
        assert caught.value.field == "teacher.address"
    assert time.monotonic() - start_time < 10


def test_something_else_there() -> None:
    """A port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        start_time = time.monotonic()
        with TeacherClient(address, patience_seconds=1.0) as client:
            answer = client.submit(make_queries(1)[0])
            assert isinstance(answer.exception(WAIT), Unavailable)
            with pytest.raises(Unavailable):
                client.info()
        assert time.monotonic() - start_time < 10


def test_three_that_are_away_take_as_long_as_one() -> None:
    with contextlib.ExitStack() as silent:
        listeners = [silent.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "abc"]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        start_time = time.monotonic()
        with TeacherClient(addresses) as client, pytest.raises(Unavailable):
            client.info()
        assert 4.5 < time.monotonic() - start_time < 14  # one after the other: 15 s


def test_a_server_that_is_not_a_teacher_is_no_outage() -> None:
    """The user must change the address, so the client does not wait."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with TeacherClient(f"127.0.0.1:{port}", patience_seconds=60.0) as client:
            with pytest.raises(InvalidInput, match="is not a teacher"):
                client.info()
            fault = client.submit(make_queries(1)[0]).exception(WAIT)
            assert isinstance(fault, InvalidInput), fault
    finally:
        server.stop(None)


def test_a_wrong_address_beside_a_teacher(
    start_teacher: StartTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is refused before a job starts; a good teacher that goes away is waited for."""
    monkeypatch.setattr("clients.teacher.client._BUSY_FACTOR", 2)
    teacher = start_teacher("--engine", "fake", "--model", "vocab=1000")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        addresses = [teacher.address, f"127.0.0.1:{port}"]
        with TeacherClient(addresses, patience_seconds=3.0) as client:
            with pytest.raises(InvalidInput, match=f"127.0.0.1:{port} is not a teacher"):
                client.info()
            assert len(client.submit(make_queries(1)[0]).result(WAIT)) > 0
            teacher.kill()
            fault = client.submit(make_queries(2)[1]).exception(WAIT)
            assert isinstance(fault, Unavailable), fault
    finally:
        server.stop(None)


class BrokenTeacher(teacher_pb2_grpc.TeacherServicer):
    """Every call fails, with status details that this project never sends."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def _fail(self, request: object, context: grpc.ServicerContext) -> NoReturn:
        context.set_trailing_metadata((("grpc-status-details-bin", self._details),))
        context.abort(grpc.StatusCode.INTERNAL, "broken 7f3a")

    GetInfo = Score = _fail


@pytest.mark.parametrize("details", [b"", b"\xff\xff\xff"])
def test_the_fault_of_a_broken_teacher_is_told(details: bytes) -> None:
    """The fault is reported, even with garbled details, and not as an absent or slow teacher."""
    server = grpc.server(ThreadPoolExecutor(4))
    teacher_pb2_grpc.add_TeacherServicer_to_server(BrokenTeacher(details), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TeacherClient(f"127.0.0.1:{port}", patience_seconds=0.2) as client:
        fault = client.submit(make_queries(1)[0]).exception(WAIT)
        assert isinstance(fault, Unavailable)
        assert "broken 7f3a" in str(fault)
        with pytest.raises(InternalFault, match="broken 7f3a"):
            client.info()
    server.stop(None).wait()


def test_close_ends_at_once(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(latency_ms=500), "--max-batch-tokens", "40")
    client = TeacherClient(teacher.address)
    answers = [client.submit(query) for query in make_queries(20)]
    time.sleep(0.2)
    start_time = time.monotonic()
    client.close()
    assert time.monotonic() - start_time < 8  # the answers would take 10 s
    with pytest.raises(CancelledError):
        answers[-1].result(WAIT)
    with pytest.raises(Unavailable):
        client.submit(make_queries(1)[0])
    assert teacher.stop() == 0
