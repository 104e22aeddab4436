"""The service: orders of several clients, lost clients, limits, large sequences, faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import rollouts_pb2, rollouts_pb2_grpc
from protos.errors import (
    Corrupt,
    InternalFault,
    InvalidInput,
    Overloaded,
    TimedOut,
    Unavailable,
    WrongState,
)
from protos.rpc.transport import CHANNEL_OPTIONS
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import Order
from student_trainer.rollout_client.wire import order_parts
from student_trainer.rollout_service import service
from student_trainer.rollout_service.schedule import Schedule
from student_trainer.rollout_service.service import RolloutServicer
from tests.forks import fork
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import (
    assert_same,
    order,
    snapshot,
    student,
)
from tests.student_trainer.rollout_service.scripted_service import (
    ScriptedEngine,
    scripted_tokens,
    serve_on_thread,
)

LONG: dict[str, Any] = {"sequences": 100, "limit": 1000, "batch_tokens": 1}


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def info_of(address: str) -> rollouts_pb2.RolloutInfo:
    with open_channel(address) as channel:
        stub = rollouts_pb2_grpc.RolloutsStub(channel)
        return stub.GetRolloutInfo(rollouts_pb2.GetRolloutInfoRequest(), wait_for_ready=True)


def test_two_trainers_share_a_service(start_service: StartService, tmp_path: Path) -> None:
    """The trainers have different lineages with equal version numbers."""
    address = start_service().address
    unfinished: list[str] = []

    def train(lineage: str, seed: int) -> None:
        with EngineClient([address]) as client:
            for number in (1, 2, 3):
                model = student(10 * seed + number)
                directory = snapshot(tmp_path / lineage, number, model)
                sent_order = order(directory, number=number, lineage=lineage, sequences=5)
                expected = sample_in_process(sent_order, model)
                for index, sequence in client.sample(sent_order):
                    assert_same(sequence, expected[index])
        unfinished.remove(lineage)

    unfinished += ["a.1", "b.1"]
    threads = [
        threading.Thread(target=train, args=(lineage, seed))
        for seed, lineage in enumerate(unfinished)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unfinished == []
    assert info_of(address).weight_loads >= 4


def test_an_iterator_that_is_closed_frees_the_engine(
    start_service: StartService, tmp_path: Path
) -> None:
    address = start_service().address
    directory = snapshot(tmp_path, 1)
    with EngineClient([address]) as client:
        sampling = client.sample(order(directory, **LONG))
        next(sampling)
        assert info_of(address).running_orders == 1
        sampling.close()
        wait_until(lambda: info_of(address).running_orders == 0)
        # Another version, which waits until no order runs.
        sent_order = order(snapshot(tmp_path, 2), number=2)
        sequences = dict(client.sample(sent_order))
    for index, expected in enumerate(sample_in_process(sent_order, student(2))):
        assert_same(sequences[index], expected)


def sample_forever(address: str, directory: Path, number: int) -> None:
    with EngineClient([address]) as client:
        for _ in client.sample(order(directory, number=number, **LONG)):
            pass


def test_a_client_that_is_killed_frees_its_place(
    start_service: StartService, tmp_path: Path
) -> None:
    address = start_service().address
    clients = [
        fork(sample_forever, address, snapshot(tmp_path, number), number) for number in (1, 2)
    ]  # one runs, one waits
    wait_until(lambda: (info_of(address).running_orders, info_of(address).waiting_orders) == (1, 1))
    for client in clients:
        client.kill()
        client.join()
    wait_until(lambda: (info_of(address).running_orders, info_of(address).waiting_orders) == (0, 0))
    sent_order = order(snapshot(tmp_path, 3), number=3)
    with EngineClient([address]) as client:
        sequences = dict(client.sample(sent_order))
    for index, expected in enumerate(sample_in_process(sent_order, student(3))):
        assert_same(sequences[index], expected)


def test_sigterm_finishes_the_orders_that_run(start_service: StartService, tmp_path: Path) -> None:
    process = start_service(failpoint="batch-sampled:sleep:0.3")
    runs = order(snapshot(tmp_path, 1), sequences=4, batch_tokens=1)
    waits = order(snapshot(tmp_path, 2), number=2)
    with EngineClient([process.address], patience_seconds=5) as client:
        running = client.sample(runs)
        next(running)
        waiting = client.sample(waits)
        wait_until(lambda: info_of(process.address).waiting_orders == 1)
        assert process.stop() == 0
        assert len(list(running)) == 3
        with pytest.raises(Unavailable) as caught:
            next(waiting)
        assert caught.value.field == "rollouts.address"


def test_a_huge_order_is_refused(start_service: StartService, tmp_path: Path) -> None:
    process = start_service()
    directory = snapshot(tmp_path, 1)
    sent_order = order(directory, sequences=1)
    huge_order = Order(
        sent_order.weights, sent_order.settings, [*sent_order.sequences] * ((1 << 16) + 1)
    )
    with EngineClient([process.address]) as client:
        with pytest.raises(InvalidInput) as caught:
            client.sample(huge_order)
        assert caught.value.field == "sequences"
        assert len(dict(client.sample(sent_order))) == 1


def test_sequences_of_16k_tokens_cross_in_parts(tmp_path: Path) -> None:
    """112 ids a token: 13 MB a sequence, in messages of at most 1 MiB."""
    sent_order = order(tmp_path, sequences=3, limit=16384, top_k=64, draws=48)
    with (
        serve_on_thread(RolloutServicer(ScriptedEngine())) as address,
        EngineClient([address]) as client,
    ):
        client.info(50_000)
        sequences = dict(client.sample(sent_order))
    for index in range(3):
        assert_same(sequences[index], scripted_tokens(sent_order, index, 1))
        assert sequences[index].versions == ((1, 16384),)


def test_a_client_that_does_not_read_holds_the_engine_back(tmp_path: Path) -> None:
    """The service buffers two sequences, besides gRPC's buffers."""
    engine = ScriptedEngine()
    servicer = RolloutServicer(engine)
    sent_order = order(tmp_path, sequences=40, limit=8192, top_k=64, draws=0)
    with serve_on_thread(servicer) as address, open_channel(address) as channel:
        call = rollouts_pb2_grpc.RolloutsStub(channel).Sample(iter(order_parts(sent_order)))
        next(call)
        wait_until(lambda: servicer._metrics.sampled_tokens > 2 * 8192)
        time.sleep(0.3)
        assert servicer._metrics.sampled_tokens < 20 * 8192
        call.cancel()
        wait_until(lambda: engine.open == 0)


def test_a_client_that_never_reads_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SECONDS_TO_READ", 0.05)
    engine = ScriptedEngine()
    servicer = RolloutServicer(engine)
    sent_order = order(tmp_path, sequences=40, limit=8192, top_k=64, draws=0)
    with serve_on_thread(servicer) as address, open_channel(address) as channel:
        call = rollouts_pb2_grpc.RolloutsStub(channel).Sample(iter(order_parts(sent_order)))
        next(call)
        wait_until(lambda: engine.open == 0)
        assert servicer._schedule.running_count == 0
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_order_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SECONDS_BETWEEN_PARTS", 0.01)

    async def silent() -> AsyncIterator[rollouts_pb2.OrderPart]:
        await asyncio.sleep(3600)
        yield rollouts_pb2.OrderPart()

    servicer = RolloutServicer(ScriptedEngine())
    with pytest.raises(TimedOut, match="no part of the order"):
        asyncio.run(servicer._read_order(silent(), service._OrderBytes(servicer)))


def test_an_overloaded_service_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits longer than its patience, as the service responds."""
    monkeypatch.setattr(Overloaded, "retry_after_ms", 50)
    engine = ScriptedEngine()
    engine.go.clear()
    servicer = RolloutServicer(engine)
    servicer._schedule = Schedule(engine.load, max_waiting=1)
    orders = [order(tmp_path, number=n) for n in (1, 2, 3)]
    with (
        serve_on_thread(servicer) as address,
        EngineClient([address], patience_seconds=0.3) as client,
    ):
        first, second = client.sample(orders[0]), client.sample(orders[1])
        threading.Timer(1.0, engine.go.set).start()
        third = client.sample(orders[2])
        assert engine.go.is_set()
        for n, sampling in enumerate((first, second, third)):
            for index, sequence in sampling:
                assert_same(sequence, scripted_tokens(orders[n], index, n + 1))


def test_orders_take_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_HELD_BYTES", 300)
    engine = ScriptedEngine()
    engine.go.clear()
    servicer = RolloutServicer(engine)
    small_order = order(tmp_path, sequences=4)
    with serve_on_thread(servicer) as address, open_channel(address) as channel:
        stub = rollouts_pb2_grpc.RolloutsStub(channel)
        small_call = stub.Sample(iter(order_parts(small_order)))
        small_call.initial_metadata()
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Sample(iter(order_parts(order(tmp_path, sequences=20)))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        small_call.cancel()
        wait_until(lambda: servicer._held_bytes == 0)


def test_a_defect_of_the_engine_ends_one_order(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.error = ZeroDivisionError("a defect")
    sent_order = order(tmp_path)
    with serve_on_thread(RolloutServicer(engine)) as address, EngineClient([address]) as client:
        with pytest.raises(InternalFault, match="internal error"):
            list(client.sample(sent_order))
        engine.error = None
        assert len(list(client.sample(sent_order))) == len(sent_order.sequences)


def test_orders_whose_weights_are_lost_end_with_the_reason(tmp_path: Path) -> None:
    """Loading the next version while they run fails, and leaves partly loaded weights."""
    engine = ScriptedEngine()
    engine.go.clear()

    def order_in_flight(number: int) -> Order:
        drained_order = order(tmp_path, number=number)
        return replace(drained_order, weights=replace(drained_order.weights, in_flight="keep"))

    with serve_on_thread(RolloutServicer(engine)) as address, EngineClient([address]) as client:
        running_order = client.sample(order_in_flight(1))
        wait_until(lambda: engine.open == 1)
        engine.load_error = Corrupt("half a snapshot")
        with pytest.raises(Corrupt, match="half a snapshot"):
            list(client.sample(order_in_flight(2)))
        with pytest.raises(Corrupt, match="half a snapshot"):
            list(running_order)
        engine.load_error = None
        engine.go.set()
        assert len(list(client.sample(order_in_flight(2)))) == 8
        assert engine.open == 0


def test_it_sleeps_between_orders_only(tmp_path: Path) -> None:
    """A request to sleep during another client's order is ignored without an error."""
    engine = ScriptedEngine(sleeps=True)
    sent_order = order(tmp_path, sequences=3)
    with serve_on_thread(RolloutServicer(engine)) as address, EngineClient([address]) as client:
        assert client.info().sleeps
        for sleeps in (1, 2):
            engine.go.clear()
            sampling = client.sample(sent_order)
            client.sleep()
            assert engine.slept == sleeps - 1
            engine.go.set()
            assert len(dict(sampling)) == 3
            wait_until(lambda: not info_of(address).running_orders)
            client.sleep()
            assert engine.slept == sleeps
            info = info_of(address)
            assert (info.weight_loads, info.HasField("loaded")) == (sleeps, False)


def test_a_service_that_does_not_sleep_says_so(start_service: StartService) -> None:
    with EngineClient([start_service().address]) as client:
        assert not client.info().sleeps
        with pytest.raises(WrongState, match="does not sleep; start the service with --sleep"):
            client.sleep()


def test_a_service_that_is_away_frees_its_memory_too(start_service: StartService) -> None:
    service = start_service()
    with EngineClient([service.address]) as client:
        service.kill()
        client.sleep()
