"""Weights that come to vLLM through a process group: tokens, and what dies in a push."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protos.rpc.ports import free_ports
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollout_client.push.stream import WeightSpec, buckets
from student_trainer.rollouts.sampler import SampledTokens
from tests.forks import Forks
from tests.student_trainer.rollout_service.processes import ServiceProcess
from tests.student_trainer.rollout_service.pushing import SMALL_BUCKET, open_trainer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    # A start of vLLM takes 20 s, on a machine with other work minutes; a test needs several.
    pytest.mark.timeout(1800),
]

from tests.vllm.rollouts import SETTINGS, Student, order_of, prompts  # noqa: E402
from tests.vllm.test_rollout_kills import LONG, assert_exact, start  # noqa: E402

# Kills in the second push. All but "push", "generation" and "probe" are of vLLM's worker; "middle"
# stands for the number of a bucket in its middle.
PHASES = (
    "push-started:kill:2",
    "generation-paused:kill:2",
    "weights-dropped:kill:2",
    "bucket-received:kill:middle",
    "push-received:kill:2",
    "generation-resumed:kill:2",
    "probe-scored:kill:2",
)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def students_in(folder: Path, *, tied: bool = False) -> Mapping[int, Student]:
    """A student after 0, 1 and 2 steps, whose answers no end token ends."""
    student = Student(folder, ends=(), tied=tied)
    students_by_version = {}
    for number in range(3):
        students_by_version[number] = student.frozen()
        student.learn()
    return students_by_version


def order(version: WeightsVersion, limit: int) -> Order:
    settings = replace(SETTINGS, stream_tokens=LONG)
    return order_of(version, prompts(8, 80), limit, settings)


def push_and_sample(
    students: Mapping[int, Student], weights: Path, addresses: list[str], sharding: str
) -> None:
    """In each process of a trainer: tokens after a push, and after a file of the same weights."""

    def sampled(version: WeightsVersion) -> Mapping[int, SampledTokens]:
        samples = dict(weight_trainer.client.sample(order(version, 40)))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no engine has other weights before all have sampled
        return samples

    with open_trainer(
        students[0].frozen().model, weights, addresses, sharding=sharding
    ) as weight_trainer:
        for number in (0, 1, 2):
            pushed = weight_trainer.push(number, students[number].model)
            assert pushed.pushed
            samples = sampled(pushed)
            assert_exact(students, order(pushed, 40), list(samples.items()))
            loaded = sampled(
                replace(weight_trainer.versions.write(number), lineage=f"file {number}")
            )
            for index, sample in samples.items():
                for name in ("token_ids", "token_logprobs", "head_ids"):
                    assert torch.equal(getattr(sample, name), getattr(loaded[index], name)), name


@pytest.mark.parametrize("world", [1, 2])
def test_tokens_after_a_push_are_those_after_a_file(
    tmp_path: Path, services: list[ServiceProcess], tied: bool, world: int
) -> None:
    """A trainer of one process, or of two with FSDP2; two engines. Bit for bit."""
    addresses = [service.address for service in services]
    sharding = "fsdp2" if world > 1 else "none"
    students = students_in(tmp_path, tied=tied)
    weights = tmp_path / "weights"
    forks = Forks(
        world, tmp_path / "group", push_and_sample, students, weights, addresses, sharding
    )
    assert forks.wait() == [0] * world


@pytest.fixture(scope="module")
def services(
    tied: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServiceProcess]]:
    folder = tmp_path_factory.mktemp("services")
    student = students_in(folder, tied=tied)[0]
    started_services = [start(student, folder / f"log-{number}") for number in range(2)]
    yield started_services
    for service in started_services:
        service.close()


def test_sequences_in_flight_go_on_with_pushed_weights(
    tmp_path: Path, services: list[ServiceProcess], tied: bool
) -> None:
    students = students_in(tmp_path, tied=tied)
    addresses = [entry.address for entry in services]
    model = students[0].frozen().model
    with open_trainer(
        model, tmp_path / "weights", addresses, attempt=9, in_flight="recompute"
    ) as weight_trainer:
        first = order(weight_trainer.push(0, students[0].model), LONG)
        sampling = weight_trainer.client.sample(first)
        second = order(weight_trainer.push(1, students[1].model), 20)
        assert_exact(students, second, list(weight_trainer.client.sample(second)))
        samples = list(sampling)
        assert_exact(students, first, samples)
        assert any(len(entry.versions) == 2 for _, entry in samples)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Student]:
    return students_in(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def survivor(
    endless: Mapping[int, Student], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    service = start(endless[0], tmp_path_factory.mktemp("survivor") / "log")
    yield service
    service.close()


@pytest.mark.parametrize("failpoint", PHASES)
def test_an_engine_dies_in_a_phase_of_a_push(
    endless: Mapping[int, Student], survivor: ServiceProcess, tmp_path: Path, failpoint: str
) -> None:
    """Long sequences are in flight. The other engine gets the files, and samples both parts.

    It was in the same group, and is not restarted.
    """
    sizes = [
        WeightSpec.describe(*named_parameter)
        for named_parameter in endless[0].model.named_parameters()
    ]
    middle = 3 * len(list(buckets(sizes, SMALL_BUCKET))) // 2
    (port,) = free_ports(1)
    victim = start(
        endless[0], tmp_path / "log", port, failpoint=failpoint.replace("middle", str(middle))
    )
    addresses = [victim.address, survivor.address]
    attempt = 1 + PHASES.index(failpoint)
    model = endless[0].frozen().model
    try:
        with open_trainer(
            model, tmp_path / "weights", addresses, attempt=attempt, in_flight="recompute"
        ) as weight_trainer:
            version = weight_trainer.push(0, endless[0].model)
            assert version.pushed
            first = order(version, LONG)
            sampling = weight_trainer.client.sample(first)
            newer = weight_trainer.push(1, endless[1].model)
            second = order(newer, 20)
            assert_exact(endless, second, list(weight_trainer.client.sample(second)))
            assert_exact(endless, first, list(sampling))
        assert victim.process.wait(60) != 0
        with EngineClient([survivor.address]) as client:
            assert client.info().engine == "vllm"
        assert survivor.process.poll() is None
    finally:
        victim.close()
