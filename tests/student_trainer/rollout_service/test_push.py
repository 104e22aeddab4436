"""Weights through a process group: exactness, late engines, and processes that die in a push."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from protos.errors import WrongState
from protos.rpc.failpoints import arm
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_replica import Replica
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_client.push.group import Store
from student_trainer.rollout_client.push.pusher import _PushCall
from student_trainer.rollout_client.push.stream import WeightsOffer, WeightSpec, buckets
from tests.forks import Forks
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import assert_same, order, student
from tests.student_trainer.rollout_service.pushing import SMALL_BUCKET, Trainer, open_trainer

# Buckets of the small student.
BUCKETS = len(
    list(
        buckets(
            [WeightSpec.describe(*parameter) for parameter in student(0).named_parameters()],
            SMALL_BUCKET,
        )
    )
)


def order_of(version: WeightsVersion, **options: Any) -> Order:
    return replace(order(version.directory, **options), weights=version)


def assert_sampled(client: EngineClient, version: WeightsVersion, number: int) -> None:
    """Check that an order of a version equals samples of the trainer's process, part by part."""
    sent_order = order_of(version)
    sequences = dict(client.sample(sent_order))
    parts = len(client.replicas)
    total = len(sent_order.sequences)
    for part in range(parts):
        part_slice = slice(total * part // parts, total * (part + 1) // parts)
        expected = sample_in_process(
            replace(sent_order, sequences=sent_order.sequences[part_slice]), student(number)
        )
        for index, sequence in enumerate(expected, part_slice.start):
            assert_same(sequences[index], sequence)
            assert sequences[index].versions == ((number, len(sequence.token_ids)),)


def push_and_sample(addresses: list[str], root: Path, sharding: str) -> None:
    """Push several versions through one group, in each process of a trainer."""
    with open_trainer(student(0), root, addresses, sharding=sharding) as trainer:
        groups = set()
        for number in (1, 2, 3):
            version = trainer.push(number, student(number))
            assert version.pushed
            assert not version.directory.exists()
            assert_sampled(trainer.client, version, number)
            if trainer.pusher is not None:
                groups.add(trainer.pusher._group.seat.group)
        assert len(groups) == (trainer.pusher is not None)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_pushed_weights_sample_the_bits_of_the_trainer(
    start_service: StartService, tmp_path: Path, world: int
) -> None:
    """A trainer of one process, or of two with FSDP2; two engines."""
    addresses = [start_service().address for _ in range(2)]
    sharding = "fsdp2" if world > 1 else "none"
    root = tmp_path / "weights"
    forks = Forks(world, tmp_path / "group", push_and_sample, addresses, root, sharding)
    assert forks.wait() == [0] * world


def test_an_engine_that_was_replaced_is_in_the_next_group(
    start_service: StartService, tmp_path: Path
) -> None:
    services = [start_service() for _ in range(2)]
    with open_trainer(
        student(0), tmp_path / "weights", [service.address for service in services]
    ) as trainer:
        assert trainer.push(1, student(1)).pushed
        first = trainer.pusher._group.seat.group
        services[0].kill()
        start_service(port=services[0].port)
        version = trainer.push(2, student(2))
        assert version.pushed
        assert trainer.pusher._group.seat.group != first
        assert_sampled(trainer.client, version, 2)


def test_two_trainers_share_two_engines(
    start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They list the engines in opposite orders. An engine with one offer delays the other."""
    first_address, second_address = (start_service().address for _ in range(2))
    original_push = Replica.push

    def push_slowly(self: Replica, parts: Any) -> Any:
        call = original_push(self, parts)
        time.sleep(0.3)  # so that both trainers have sent an offer
        return call

    monkeypatch.setattr(Replica, "push", push_slowly)
    with (
        open_trainer(student(0), tmp_path / "a", [first_address, second_address]) as first,
        open_trainer(student(0), tmp_path / "b", [second_address, first_address]) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        second.versions._snapshots._job = "another run"
        pushes = [pool.submit(trainer.push, 1, student(1)) for trainer in (first, second)]
        try:
            assert all(push.result(60).pushed for push in pushes)
        finally:
            for trainer in (first, second):
                trainer.pusher.close()


def test_an_engine_is_not_ready_in_time(start_service: StartService, tmp_path: Path) -> None:
    """Another trainer offers weights and does not send them, so this one writes files."""
    address = start_service().address
    with (
        open_trainer(student(0), tmp_path / "a", [address]) as holder,
        open_trainer(student(0), tmp_path / "b", [address]) as trainer,
    ):
        holder.versions._snapshots._job = "another run"
        probe, dtype = holder.versions._snapshots.probe()
        version = replace(holder.versions._snapshots.version(1), pushed=True)
        specs = [WeightSpec.describe(*parameter) for parameter in student(0).named_parameters()]
        member = _PushCall(holder.client.replicas[0], WeightsOffer(version, dtype, specs, probe))
        assert member.wait_until_ready(20)
        trainer.pusher._patience_seconds = 1.0
        assert not trainer.push(1, student(1)).pushed
        member.cancel()


def test_an_engine_that_missed_a_push_gets_files(
    start_service: StartService, tmp_path: Path
) -> None:
    services = [start_service() for _ in range(2)]
    with open_trainer(
        student(0), tmp_path / "weights", [service.address for service in services]
    ) as trainer:
        services[1].kill()
        version = trainer.push(1, student(1))
        assert not version.pushed
        start_service(port=services[1].port)
        trainer.client.info()  # waits until it can be reached
        assert_sampled(trainer.client, version, 1)
        version = trainer.push(2, student(2))
        assert version.pushed, "both are in the next group"
        assert_sampled(trainer.client, version, 2)


@pytest.mark.parametrize(
    "failpoint", ["push-started:kill:2", f"bucket-received:kill:{BUCKETS + 2}"]
)
def test_an_engine_dies_in_a_push(
    start_service: StartService, tmp_path: Path, failpoint: str
) -> None:
    """The other engine loads the files written in its place, and is in the next group."""
    victim, survivor = start_service(failpoint=failpoint), start_service()
    addresses = [victim.address, survivor.address]
    with open_trainer(student(0), tmp_path / "weights", addresses) as trainer:
        assert trainer.push(1, student(1)).pushed
        version = trainer.push(2, student(2))
        assert not version.pushed
        assert victim.process.wait(20) == -9
        start_service(port=victim.port)
        trainer.client.info()  # waits until it can be reached
        assert_sampled(trainer.client, version, 2)
        assert trainer.push(3, student(3)).pushed


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_store_on_ipv6() -> None:
    assert Store("::1").seat("gloo", 2).host == "::1"


def push_twice(address: str, root: Path, failpoint: str) -> None:
    trainer = Trainer(student(0), root, [address])
    trainer.push(1, student(1))
    arm(failpoint)
    trainer.push(2, student(2))


@pytest.mark.parametrize(
    "failpoint", ["push-begun:kill", "layer-gathered:kill", "bucket-sent:kill", "weights-sent:kill"]
)
def test_a_trainer_dies_in_a_push(
    start_service: StartService, tmp_path: Path, failpoint: str
) -> None:
    """The engine is free for its next attempt at once."""
    address = start_service().address
    forks = Forks(1, tmp_path / "group", push_twice, address, tmp_path / "weights", failpoint)
    assert forks.wait(60) == [-9]
    with open_trainer(student(0), tmp_path / "second", [address], attempt=2) as trainer:
        version = trainer.push(5, student(5))
        assert version.pushed
        assert_sampled(trainer.client, version, 5)


def test_a_push_of_an_earlier_attempt_is_refused(
    start_service: StartService, tmp_path: Path
) -> None:
    address = start_service().address
    with (
        open_trainer(student(0), tmp_path / "1", [address]) as earlier,
        open_trainer(student(0), tmp_path / "2", [address], attempt=2) as later,
    ):
        assert earlier.push(1, student(1)).pushed
        version = later.push(2, student(2))
        refused = earlier.push(3, student(3))
        assert not refused.pushed
        with pytest.raises(WrongState, match="attempt 2 of this job has replaced"):
            list(earlier.client.sample(order_of(refused)))
        assert_sampled(later.client, version, 2)


def test_a_push_of_another_model_is_refused(start_service: StartService, tmp_path: Path) -> None:
    """The engine drops partly loaded weights, and has none until the next push."""
    address = start_service().address
    with open_trainer(student(0, layers=3), tmp_path / "1", [address]) as other_trainer:
        assert not other_trainer.push(1, student(1, layers=3)).pushed
    with open_trainer(student(0), tmp_path / "2", [address], attempt=2) as trainer:
        version = trainer.push(2, student(2))
        assert version.pushed
        assert_sampled(trainer.client, version, 2)
