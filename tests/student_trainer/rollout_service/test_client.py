"""The client with real services: bits, divided orders, lost replicas, and errors."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from protos.errors import Corrupt, InvalidInput, Unavailable, WrongState
from protos.rpc.ports import free_ports
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import SampledTokens
from tests.distill_server.conftest import eventually
from tests.documents import blocks
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.in_process import in_process
from tests.student_trainer.rollout_service.material import (
    assert_same,
    order,
    snapshot,
    student,
)

VOCAB = len(tiny.tokenizer())


def collected(client: EngineClient, wanted: Order) -> list[SampledTokens]:
    """The sequences of an order, each exactly once, in the order's order."""
    found: dict[int, SampledTokens] = {}
    for index, sampled in client.sample(wanted):
        assert index not in found
        found[index] = sampled
    assert sorted(found) == list(range(len(wanted.sequences)))
    return [found[index] for index in sorted(found)]


def part_of(wanted: Order, first: int, end: int) -> Order:
    return Order(wanted.weights, wanted.settings, wanted.sequences[first:end])


def assert_all_same(found: list[SampledTokens], expected: list[SampledTokens]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_service_samples_the_bits_of_the_trainers_process(
    start_service: StartService, tmp_path: Path
) -> None:
    service = start_service()
    with EngineClient([service.address]) as client:
        assert client.info(VOCAB).engine == "hf"
        for number in (1, 2):
            wanted = order(snapshot(tmp_path, number), number=number)
            found = collected(client, wanted)
            assert_all_same(found, in_process(wanted, student(number)))
            assert all(one.versions == ((number, len(one.token_ids)),) for one in found)


def test_an_order_is_divided_over_the_replicas_by_rank(
    start_service: StartService, tmp_path: Path
) -> None:
    """Each replica samples its contiguous part as one order."""
    addresses = [start_service().address for _ in range(2)]
    wanted = order(snapshot(tmp_path, 1), sequences=7)
    own = [*in_process(part_of(wanted, 0, 3), student(1))]
    own += in_process(part_of(wanted, 3, 7), student(1))
    for rank in (0, 1, 2):
        with EngineClient(addresses, rank=rank) as client:
            assert_all_same(collected(client, wanted), own)
            single = part_of(wanted, 0, 1)
            assert_all_same(collected(client, single), in_process(single, student(1)))
    for address in addresses:
        with EngineClient([address]) as client:
            # The whole parts of three ranks, and the single sequences of one or two of them.
            assert client._replicas[0].request_info().result().weight_loads == 1


def test_the_example_of_the_page(start_service: StartService, tmp_path: Path) -> None:
    (example,) = blocks("docs/rollouts.md", "rollouts")
    wanted = order(snapshot(tmp_path, 1))
    names = {"addresses": [start_service().address], "vocab_size": VOCAB, "order": wanted}
    exec(example.body, names)
    found: Any = names["found"]
    assert_all_same([found[n] for n in sorted(found)], in_process(wanted, student(1)))


def test_several_threads_may_order_at_once(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    directory = snapshot(tmp_path, 1)
    orders = [order(directory, first=100 * n, sequences=5 + n) for n in range(4)]
    found: dict[int, list[SampledTokens]] = {}
    with EngineClient([service.address]) as client:

        def ask(number: int) -> None:
            found[number] = collected(client, orders[number])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, wanted in enumerate(orders):
        assert_all_same(found[number], in_process(wanted, student(1)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_is_killed_at_random_points(
    start_service: StartService, tmp_path: Path, replicas: int
) -> None:
    """10 kills in mid-order, the replica started again each time: no sequence lost or doubled."""
    moments = random.Random(replicas)
    ports = free_ports(replicas)
    services = [start_service(port=port) for port in ports]
    directory = snapshot(tmp_path, 1)
    wanted = order(directory, sequences=12, limit=20, batch_tokens=50)
    per = len(wanted.sequences) // replicas
    own = [
        sampled
        for first in range(0, len(wanted.sequences), per)
        for sampled in in_process(part_of(wanted, first, first + per), student(1))
    ]
    with EngineClient([service.address for service in services]) as client:
        collected(client, wanted)  # loads the weights
        began = time.perf_counter()
        collected(client, wanted)
        usual = time.perf_counter() - began
        for _ in range(10):
            victim = moments.randrange(replicas)
            delay = threading.Event()
            found: list[list[SampledTokens]] = []
            asking = threading.Thread(target=lambda: found.append(collected(client, wanted)))  # noqa: B023
            asking.start()
            delay.wait(moments.uniform(0, usual))
            services[victim].kill()
            services[victim] = start_service(port=ports[victim])
            asking.join()
            assert_all_same(found[0], own)


@pytest.mark.parametrize(
    "failpoint",
    [
        "order-started:kill:1",
        "weight-file-read:kill:1",
        "weights-copied:kill:1",
        "batch-sampled:kill:1",
        "batch-sampled:kill:3",
        "sampled-part-sent:kill:1",
        "sampled-part-sent:kill:7",
    ],
)
def test_a_replica_that_dies_at_a_chosen_point(
    start_service: StartService, tmp_path: Path, failpoint: str
) -> None:
    """Another replica samples its part, to the bit."""
    addresses = [start_service(failpoint=failpoint).address, start_service().address]
    wanted = order(snapshot(tmp_path, 1), sequences=16, batch_tokens=40)
    own = [*in_process(part_of(wanted, 0, 8), student(1))]
    own += in_process(part_of(wanted, 8, 16), student(1))
    with EngineClient(addresses) as client:
        assert_all_same(collected(client, wanted), own)


def test_no_replica_for_too_long(start_service: StartService, tmp_path: Path) -> None:
    service = start_service("--threads", "1", failpoint="weights-copied:kill")
    wanted = order(snapshot(tmp_path, 1))
    with EngineClient([service.address], patience_seconds=0.5) as client:
        with pytest.raises(Unavailable) as caught:
            collected(client, wanted)
        assert caught.value.field == "rollouts.address"
        assert f"no rollout service answers at {service.address} for 0.5 s" in str(caught.value)
        with pytest.raises(Unavailable) as caught:  # nobody takes the order
            client.sample(wanted)
        assert caught.value.field == "rollouts.address"


def test_an_order_waits_longer_than_the_patience(
    start_service: StartService, tmp_path: Path
) -> None:
    """A service that has an order may take its time."""
    service = start_service(failpoint="batch-sampled:sleep:0.6")
    wanted = order(snapshot(tmp_path, 1), sequences=3, batch_tokens=1)
    with EngineClient([service.address], patience_seconds=0.3) as client:
        assert_all_same(collected(client, wanted), in_process(wanted, student(1)))


def test_a_wrong_snapshot_or_order_is_raised(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    with EngineClient([service.address]) as client:
        half = tmp_path / "half"
        half.mkdir()
        with pytest.raises(Corrupt, match="is not a complete snapshot"):
            collected(client, order(half))
        directory = snapshot(tmp_path, 1)
        with pytest.raises(InvalidInput) as caught:
            client.sample(order(directory, limit=4000))
        assert caught.value.field == "sequences[0].limit"
        wanted = order(directory)
        in_flight = replace(wanted.weights, in_flight="keep")
        with pytest.raises(InvalidInput) as caught:
            client.sample(replace(wanted, weights=in_flight))
        assert caught.value.field == "weights.in_flight"
        assert_all_same(collected(client, wanted), in_process(wanted, student(1)))


def test_what_the_client_asks_before_the_first_step(
    start_service: StartService, tmp_path: Path
) -> None:
    one, other = start_service(), start_service("--dtype", "bfloat16")
    with EngineClient([one.address]) as client:
        info = client.info(VOCAB)
        assert (info.engine, info.vocab_size, info.dtype) == ("hf", VOCAB, "float32")
        with pytest.raises(WrongState, match=f"has {VOCAB} token ids, the student has 7") as caught:
            client.info(7)
        assert caught.value.field == "rollouts.address"
    with EngineClient([one.address, other.address]) as client:
        with pytest.raises(WrongState, match="start all rollout services with the same"):
            client.info(VOCAB)
        other.kill()
        assert client.info(VOCAB).dtype == "float32"


def test_a_server_that_is_no_rollout_service(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with EngineClient([f"127.0.0.1:{port}"]) as client:
        with pytest.raises(InvalidInput, match="is not a rollout service"):
            client.info()
        with pytest.raises(InvalidInput, match="is not a rollout service"):
            client.sample(order(tmp_path))
    server.stop(None).wait()


def test_another_program_in_place_of_a_service_is_waited_out(
    start_service: StartService, tmp_path: Path
) -> None:
    """As a gateway does that answers 404 while the machine of the service is away."""
    service = start_service()
    wanted = order(snapshot(tmp_path, 1), sequences=3)
    with EngineClient([service.address], patience_seconds=60.0) as client:
        expected = collected(client, wanted)
        service.kill()
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_insecure_port(service.address)
        server.start()
        sampling = client.start(wanted)
        time.sleep(1)
        server.stop(None).wait()
        again = start_service(port=service.port)
        found = dict(sampling)
    assert again.address == service.address
    assert_all_same([found[index] for index in sorted(found)], expected)


def test_closing_ends_everything(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    before = set(threading.enumerate())
    wanted = order(snapshot(tmp_path, 1), sequences=200, limit=1000, batch_tokens=1)
    client = EngineClient([service.address])
    iterator = client.sample(wanted)
    next(iterator)
    failed: list[Exception] = []

    def go_on() -> None:
        try:
            list(iterator)
        except Unavailable as error:
            failed.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    client.close()
    thread.join()
    assert "was cancelled" in str(failed[0])
    client.close()
    with pytest.raises(Unavailable, match="is closed"):
        client.sample(wanted)
    assert list(iterator) == []
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_frozen_replica_leaves_time_for_another(
    start_service: StartService, tmp_path: Path
) -> None:
    frozen, other = start_service(), start_service()
    wanted = order(snapshot(tmp_path, 1), sequences=1)
    with EngineClient([frozen.address, other.address], patience_seconds=4) as client:
        client.info()  # connects
        frozen.send(signal.SIGSTOP)
        try:
            assert_all_same(collected(client, wanted), in_process(wanted, student(1)))
        finally:
            frozen.send(signal.SIGCONT)


def test_an_order_that_cannot_be_sent_leaves_no_thread(tmp_path: Path) -> None:
    """Its second part is too large for a message, and the first has been started."""
    wanted = order(tmp_path, sequences=2)
    large = replace(wanted.sequences[1], token_ids=torch.zeros(1 << 20, dtype=torch.long))
    wanted = replace(wanted, sequences=[wanted.sequences[0], large])
    before = set(threading.enumerate())
    with EngineClient(["127.0.0.1:1", "127.0.0.1:2"]) as client:
        with pytest.raises(InvalidInput, match="token_ids"):
            client.sample(wanted)
        assert client._unfinished == set()
    # gRPC's own thread of a closed channel takes a moment to end.
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_client_needs_an_address() -> None:
    with pytest.raises(InvalidInput, match=r"rollouts\.address: is empty"):
        EngineClient([])
