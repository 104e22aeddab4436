"""The client with real services: bit-identical samples, divided orders, lost replicas, errors."""

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
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import (
    assert_same,
    order,
    snapshot,
    student,
)

VOCAB = len(tiny.tokenizer())


def collect_sequences(client: EngineClient, requested: Order) -> list[SampledTokens]:
    """Return the sequences of an order by index, and check that each comes exactly once."""
    sequences: dict[int, SampledTokens] = {}
    for index, sequence in client.sample(requested):
        assert index not in sequences
        sequences[index] = sequence
    assert sorted(sequences) == list(range(len(requested.sequences)))
    return [sequences[index] for index in sorted(sequences)]


def part_of(whole_order: Order, first: int, end: int) -> Order:
    return Order(whole_order.weights, whole_order.settings, whole_order.sequences[first:end])


def assert_all_same(actual: list[SampledTokens], expected: list[SampledTokens]) -> None:
    for sequence, expected_sequence in zip(actual, expected, strict=True):
        assert_same(sequence, expected_sequence)


def test_a_service_samples_the_bits_of_the_trainers_process(
    start_service: StartService, tmp_path: Path
) -> None:
    service = start_service()
    with EngineClient([service.address]) as client:
        assert client.info(VOCAB).engine == "hf"
        for number in (1, 2):
            sent_order = order(snapshot(tmp_path, number), number=number)
            sequences = collect_sequences(client, sent_order)
            assert_all_same(sequences, sample_in_process(sent_order, student(number)))
            assert all(
                sequence.versions == ((number, len(sequence.token_ids)),) for sequence in sequences
            )


def test_an_order_is_divided_over_the_replicas_by_rank(
    start_service: StartService, tmp_path: Path
) -> None:
    """Each replica samples its contiguous part as one order."""
    addresses = [start_service().address for _ in range(2)]
    sent_order = order(snapshot(tmp_path, 1), sequences=7)
    expected = [*sample_in_process(part_of(sent_order, 0, 3), student(1))]
    expected += sample_in_process(part_of(sent_order, 3, 7), student(1))
    for rank in (0, 1, 2):
        with EngineClient(addresses, rank=rank) as client:
            assert_all_same(collect_sequences(client, sent_order), expected)
            single = part_of(sent_order, 0, 1)
            assert_all_same(
                collect_sequences(client, single), sample_in_process(single, student(1))
            )
    for address in addresses:
        with EngineClient([address]) as client:
            # Parts of the order of three ranks, and the single sequences of one or two of them.
            assert client._replicas[0].request_info().result().weight_loads == 1


def test_the_example_of_the_page(start_service: StartService, tmp_path: Path) -> None:
    (example,) = blocks("docs/rollouts.md", "rollouts")
    sent_order = order(snapshot(tmp_path, 1))
    names = {"addresses": [start_service().address], "vocab_size": VOCAB, "order": sent_order}
    exec(example.body, names)
    sequences: Any = names["found"]
    assert_all_same(
        [sequences[n] for n in sorted(sequences)], sample_in_process(sent_order, student(1))
    )


def test_several_threads_may_order_at_once(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    directory = snapshot(tmp_path, 1)
    orders = [order(directory, first=100 * n, sequences=5 + n) for n in range(4)]
    sequences: dict[int, list[SampledTokens]] = {}
    with EngineClient([service.address]) as client:

        def sample_order(number: int) -> None:
            sequences[number] = collect_sequences(client, orders[number])

        threads = [threading.Thread(target=sample_order, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, sent_order in enumerate(orders):
        assert_all_same(sequences[number], sample_in_process(sent_order, student(1)))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_is_killed_at_random_points(
    start_service: StartService, tmp_path: Path, replicas: int
) -> None:
    """10 kills during orders, with restarts: no sequence is lost or repeated."""
    moments = random.Random(replicas)
    ports = free_ports(replicas)
    services = [start_service(port=port) for port in ports]
    directory = snapshot(tmp_path, 1)
    sent_order = order(directory, sequences=12, limit=20, batch_tokens=50)
    per_replica = len(sent_order.sequences) // replicas
    expected = [
        sampled
        for first in range(0, len(sent_order.sequences), per_replica)
        for sampled in sample_in_process(
            part_of(sent_order, first, first + per_replica), student(1)
        )
    ]
    with EngineClient([service.address for service in services]) as client:
        collect_sequences(client, sent_order)  # loads the weights
        start_time = time.perf_counter()
        collect_sequences(client, sent_order)
        usual_seconds = time.perf_counter() - start_time
        for _ in range(10):
            victim = moments.randrange(replicas)
            delay = threading.Event()
            results: list[list[SampledTokens]] = []
            client_thread = threading.Thread(
                target=lambda: results.append(collect_sequences(client, sent_order))  # noqa: B023
            )
            client_thread.start()
            delay.wait(moments.uniform(0, usual_seconds))
            services[victim].kill()
            services[victim] = start_service(port=ports[victim])
            client_thread.join()
            assert_all_same(results[0], expected)


@pytest.mark.parametrize(
    "failpoint",
    [
        "order-started:kill:1",
        pytest.param("weight-file-read:kill:1", marks=pytest.mark.slow),
        "weights-copied:kill:1",
        pytest.param("batch-sampled:kill:1", marks=pytest.mark.slow),
        "batch-sampled:kill:3",
        pytest.param("sampled-part-sent:kill:1", marks=pytest.mark.slow),
        "sampled-part-sent:kill:7",
    ],
)
def test_a_replica_that_dies_at_a_chosen_point(
    start_service: StartService, tmp_path: Path, failpoint: str
) -> None:
    """Another replica samples its part, bit-identically."""
    addresses = [start_service(failpoint=failpoint).address, start_service().address]
    sent_order = order(snapshot(tmp_path, 1), sequences=16, batch_tokens=40)
    expected = [*sample_in_process(part_of(sent_order, 0, 8), student(1))]
    expected += sample_in_process(part_of(sent_order, 8, 16), student(1))
    with EngineClient(addresses) as client:
        assert_all_same(collect_sequences(client, sent_order), expected)


def test_no_replica_for_too_long(start_service: StartService, tmp_path: Path) -> None:
    service = start_service("--threads", "1", failpoint="weights-copied:kill")
    sent_order = order(snapshot(tmp_path, 1))
    with EngineClient([service.address], patience_seconds=0.5) as client:
        with pytest.raises(Unavailable) as caught:
            collect_sequences(client, sent_order)
        assert caught.value.field == "rollouts.address"
        assert f"no rollout service answers at {service.address} for 0.5 s" in str(caught.value)
        with pytest.raises(Unavailable) as caught:  # no service accepts the order
            client.sample(sent_order)
        assert caught.value.field == "rollouts.address"


def test_an_order_waits_longer_than_the_patience(
    start_service: StartService, tmp_path: Path
) -> None:
    """The patience does not limit a service that has the order."""
    service = start_service(failpoint="batch-sampled:sleep:0.6")
    sent_order = order(snapshot(tmp_path, 1), sequences=3, batch_tokens=1)
    with EngineClient([service.address], patience_seconds=0.3) as client:
        assert_all_same(
            collect_sequences(client, sent_order), sample_in_process(sent_order, student(1))
        )


def test_a_wrong_snapshot_or_order_is_raised(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    with EngineClient([service.address]) as client:
        incomplete = tmp_path / "half"
        incomplete.mkdir()
        with pytest.raises(Corrupt, match="is not a complete snapshot"):
            collect_sequences(client, order(incomplete))
        directory = snapshot(tmp_path, 1)
        with pytest.raises(InvalidInput) as caught:
            client.sample(order(directory, limit=4000))
        assert caught.value.field == "sequences[0].limit"
        sent_order = order(directory)
        in_flight = replace(sent_order.weights, in_flight="keep")
        with pytest.raises(InvalidInput) as caught:
            client.sample(replace(sent_order, weights=in_flight))
        assert caught.value.field == "weights.in_flight"
        assert_all_same(
            collect_sequences(client, sent_order), sample_in_process(sent_order, student(1))
        )


def test_what_the_client_asks_before_the_first_step(
    start_service: StartService, tmp_path: Path
) -> None:
    service, bfloat16_service = start_service(), start_service("--dtype", "bfloat16")
    with EngineClient([service.address]) as client:
        info = client.info(VOCAB)
        assert (info.engine, info.vocab_size, info.dtype) == ("hf", VOCAB, "float32")
        with pytest.raises(WrongState, match=f"has {VOCAB} token ids, the student has 7") as caught:
            client.info(7)
        assert caught.value.field == "rollouts.address"
    with EngineClient([service.address, bfloat16_service.address]) as client:
        with pytest.raises(WrongState, match="start all rollout services with the same"):
            client.info(VOCAB)
        bfloat16_service.kill()
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
    """For example a gateway that answers 404 while the service's machine is down."""
    service = start_service()
    sent_order = order(snapshot(tmp_path, 1), sequences=3)
    with EngineClient([service.address], patience_seconds=60.0) as client:
        expected = collect_sequences(client, sent_order)
        service.kill()
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_insecure_port(service.address)
        server.start()
        sampling = client.start(sent_order)
        time.sleep(1)
        server.stop(None).wait()
        restarted = start_service(port=service.port)
        sequences = dict(sampling)
    assert restarted.address == service.address
    assert_all_same([sequences[index] for index in sorted(sequences)], expected)


def test_closing_ends_everything(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    threads_before = set(threading.enumerate())
    sent_order = order(snapshot(tmp_path, 1), sequences=200, limit=1000, batch_tokens=1)
    client = EngineClient([service.address])
    iterator = client.sample(sent_order)
    next(iterator)
    errors: list[Exception] = []

    def read_to_end() -> None:
        try:
            list(iterator)
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=read_to_end)
    thread.start()
    client.close()
    thread.join()
    assert "was cancelled" in str(errors[0])
    client.close()
    with pytest.raises(Unavailable, match="is closed"):
        client.sample(sent_order)
    assert list(iterator) == []
    eventually(lambda: set(threading.enumerate()) <= threads_before)


def test_a_frozen_replica_leaves_time_for_another(
    start_service: StartService, tmp_path: Path
) -> None:
    frozen_service, healthy_service = start_service(), start_service()
    sent_order = order(snapshot(tmp_path, 1), sequences=1)
    with EngineClient(
        [frozen_service.address, healthy_service.address], patience_seconds=4
    ) as client:
        client.info()  # connects
        frozen_service.send(signal.SIGSTOP)
        try:
            assert_all_same(
                collect_sequences(client, sent_order), sample_in_process(sent_order, student(1))
            )
        finally:
            frozen_service.send(signal.SIGCONT)


def test_an_order_that_cannot_be_sent_leaves_no_thread(tmp_path: Path) -> None:
    """Its second part exceeds a message, after the first part has started."""
    sent_order = order(tmp_path, sequences=2)
    large_sequence = replace(
        sent_order.sequences[1], token_ids=torch.zeros(1 << 20, dtype=torch.long)
    )
    sent_order = replace(sent_order, sequences=[sent_order.sequences[0], large_sequence])
    threads_before = set(threading.enumerate())
    with EngineClient(["127.0.0.1:1", "127.0.0.1:2"]) as client:
        with pytest.raises(InvalidInput, match="token_ids"):
            client.sample(sent_order)
        assert client._unfinished == set()
    # gRPC's own thread of a closed channel takes a moment to end.
    eventually(lambda: set(threading.enumerate()) <= threads_before)


def test_a_client_needs_an_address() -> None:
    with pytest.raises(InvalidInput, match=r"rollouts\.address: is empty"):
        EngineClient([])
