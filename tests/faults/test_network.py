"""Streams over faulty networks: the answers are correct, or an error comes in time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import Unavailable
from protos.rpc import channel
from tests.faults.history import History
from tests.faults.proxy import FaultProxy, Toxics
from tests.faults.sequences import VOCAB, WAIT, assert_equal, expected, fake, sequences
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.processes import TeacherProcess


@pytest.fixture
def quick_keepalive(monkeypatch: pytest.MonkeyPatch) -> float:
    """The client pings ten times as often as by default: it notices a silent connection after
    the returned seconds instead of 40.
    """
    scaled = {
        "grpc.keepalive_time_ms": 3_000,
        "grpc.keepalive_timeout_ms": 1_000,
        "grpc.http2.ping_timeout_ms": 4_000,
    }
    options = [(name, scaled.get(name, value)) for name, value in channel.CHANNEL_OPTIONS]
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", options)
    return 4.0


@pytest.fixture
def teacher(start_teacher: StartTeacher) -> TeacherProcess:
    return start_teacher(*fake())


# A connection must carry at least a whole message, 1 MiB at most, to make progress.
BAD_NETWORKS = {
    "reset after 1.5 MB": Toxics(reset_after_bytes=1_500_000),
    "reset after 3 MB, in slices": Toxics(reset_after_bytes=3_000_000, slice_bytes=1000),
    "latency of 200 +- 100 ms": Toxics(latency_seconds=0.2, jitter_seconds=0.1),
    "slices of 100 bytes": Toxics(slice_bytes=100),
    "connections of a second": Toxics(timeout_seconds=1.0),
}


@pytest.mark.parametrize("toxics", BAD_NETWORKS.values(), ids=BAD_NETWORKS)
def test_the_same_answers_over_a_bad_network(
    teacher: TeacherProcess, history: History, toxics: Toxics
) -> None:
    """9 MB: 2 x 10,000 rows of 408 bytes and 20 short sequences."""
    queries = sequences(2, 10_000) + sequences(20, 100, seed=1)
    with FaultProxy(teacher.address, toxics) as proxy:
        start_time = time.monotonic()
        with TeacherClient(proxy.address, max_in_flight=4) as client:
            assert_equal([client.submit(query) for query in queries], expected(queries))
        seconds = time.monotonic() - start_time
    assert history.check(queries) == sum(query.rows for query in queries)
    if toxics.reset_after_bytes:
        assert proxy.resets >= 2
        assert history.count_resumed() >= 1
    print(f"{seconds:.1f} s, {proxy.connections} connections, {proxy.resets} resets")


def test_ten_kilobytes_a_second(teacher: TeacherProcess, history: History) -> None:
    queries = sequences(10, 100, top_k=4)  # 33 KB
    with FaultProxy(teacher.address, Toxics(bytes_per_second=10_000)) as proxy:
        start_time = time.monotonic()
        with TeacherClient(proxy.address) as client:
            assert_equal([client.submit(query) for query in queries], expected(queries))
        seconds = time.monotonic() - start_time
    history.check(queries)
    assert seconds > 2, "it was no slow network"


def test_a_black_hole_is_noticed(
    teacher: TeacherProcess, history: History, quick_keepalive: float
) -> None:
    """Packets are dropped silently for a while: the client notices and continues afterwards."""
    queries = sequences(300, 100, top_k=4)
    with FaultProxy(teacher.address) as proxy, TeacherClient(proxy.address) as client:
        client.submit(queries[0]).result(WAIT)
        history.forget()
        proxy.toxics = Toxics(blackhole=True)
        answers = [client.submit(query) for query in queries]
        fault_time = time.monotonic()
        connections = proxy.connections
        while proxy.connections == connections:
            assert time.monotonic() - fault_time < 60
            time.sleep(0.01)
        detection_seconds = time.monotonic() - fault_time
        time.sleep(1)
        proxy.toxics = Toxics()
        assert_equal(answers, expected(queries))
    history.check(queries)
    assert detection_seconds < 10 * quick_keepalive
    print(f"noticed after {detection_seconds:.1f} s, with all limits a tenth of what they are")


def test_a_black_hole_beside_a_good_teacher(
    start_teacher: StartTeacher, teacher: TeacherProcess, quick_keepalive: float
) -> None:
    """The client sends the lost requests to the other teacher."""
    queries = sequences(50, 100, top_k=4)
    with FaultProxy(teacher.address) as proxy:
        addresses = [proxy.address, start_teacher(*fake()).address]
        with TeacherClient(addresses, max_in_flight=8) as client:
            client.info()
            proxy.toxics = Toxics(blackhole=True)
            start_time = time.monotonic()
            assert_equal([client.submit(query) for query in queries], expected(queries))
            assert time.monotonic() - start_time < 10 * quick_keepalive


def test_a_black_hole_for_good(teacher: TeacherProcess) -> None:
    patience = 3.0
    with (
        FaultProxy(teacher.address) as proxy,
        TeacherClient(proxy.address, patience_seconds=patience) as client,
    ):
        client.submit(sequences(1, 100)[0]).result(WAIT)
        proxy.toxics = Toxics(blackhole=True)
        fault_time = time.monotonic()
        assert isinstance(client.submit(sequences(1, 100)[0]).exception(WAIT), Unavailable)
        assert 0.9 * patience < time.monotonic() - fault_time < 10 * patience


def test_long_answers_come_in_messages_of_a_mebibyte(
    teacher: TeacherProcess, history: History
) -> None:
    queries = [ScoreQuery(np.arange(20_000, dtype=np.int32) % VOCAB, 1, top_k=VOCAB, f32=True)]
    with TeacherClient(teacher.address) as client:
        assert_equal([client.submit(queries[0])], expected(queries))
    assert history.check(queries) == 19_999
    assert 8 <= history.messages() <= 9  # 8.2 MB of rows
