"""Services with the vllm engine, killed: no token lost, doubled or under a wrong version."""

from __future__ import annotations

import importlib.util
import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from protos.rpc.ports import free_ports
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import Order, WeightsVersion
from student_trainer.rollouts.sampler import SampledTokens
from tests.student_trainer.rollout_service.processes import ServiceProcess

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    # A start of vLLM takes 20 s, on a machine with other work minutes; a test needs several.
    pytest.mark.timeout(1800 + 300 * int(os.environ.get("DISTILL_REPEATS", "0"))),
]

from tests.vllm.rollouts import (  # noqa: E402
    SETTINGS,
    Student,
    assert_sampled,
    exact_logits,
    order_of,
    prompts,
)

# So many kills at random moments; more in a long test.
KILLS = int(os.environ.get("DISTILL_REPEATS", "2"))
LONG = 300
# Of the second load. "weight..." kills vLLM's worker, the others its parent.
PHASES = (
    "generation-paused:kill:2",
    "weights-dropped:kill:2",
    "weight-file-read:kill:2",
    "weights-replaced:kill:2",
    "generation-resumed:kill:2",
    "probe-scored:kill:2",
)


def start(student: Student, log: Path, port: int = 0, failpoint: str = "") -> ServiceProcess:
    options = ["--engine", "vllm", "--model", str(student.path), "--max-batch-tokens", "512"]
    return ServiceProcess(*options, log=log, port=port, failpoint=failpoint, launched=True)


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Student]:
    """A student after 0, 1 and 2 steps, whose answers no end token ends."""
    student = Student(tmp_path_factory.mktemp("student"), ends=())
    students_by_version = {}
    for number in range(3):
        student.snapshot()
        students_by_version[number] = student.frozen()
        student.learn()
    return students_by_version


@pytest.fixture(scope="module")
def survivor(
    students: Mapping[int, Student], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    service = start(students[0], tmp_path_factory.mktemp("survivor") / "log")
    yield service
    service.close()


def version_of(student: Student, lineage: str) -> WeightsVersion:
    return replace(student.snapshot("recompute"), lineage=lineage)


def order(version: WeightsVersion, limit: int) -> Order:
    settings = replace(SETTINGS, stream_tokens=LONG)
    return order_of(version, prompts(8, 80), limit, settings)


def assert_exact(
    students: Mapping[int, Student], sampling_order: Order, samples: list[tuple[int, SampledTokens]]
) -> None:
    """Each sequence once and whole, each token by the weights of the version that it names."""
    assert sorted(index for index, _ in samples) == list(range(len(sampling_order.sequences)))
    for index, got in samples:
        sequence = sampling_order.sequences[index]
        assert len(got.token_ids) == sequence.limit
        assert min(number for number, _ in got.versions) >= sampling_order.weights.number
        logits = exact_logits(students, sequence, got)
        assert_sampled(sequence, sampling_order.settings, got, logits, ())


@pytest.mark.parametrize("failpoint", PHASES)
def test_a_service_that_dies_in_a_phase_of_a_push(
    students: Mapping[int, Student], survivor: ServiceProcess, tmp_path: Path, failpoint: str
) -> None:
    """Long sequences of the older version are in flight. The other service samples both parts."""
    older, newer = (version_of(students[number], failpoint) for number in (0, 1))
    victim = start(students[0], tmp_path / "log", failpoint=failpoint)
    addresses = [victim.address, survivor.address]
    try:
        with EngineClient(addresses) as client:
            first = client.sample(order(older, LONG))
            second = client.sample(order(newer, 20))
            assert_exact(students, order(newer, 20), list(second))
            assert_exact(students, order(older, LONG), list(first))
        psutil.wait_procs([psutil.Process(victim.process.pid)], timeout=60)
        assert victim.process.poll() is not None
    finally:
        victim.close()


def test_a_service_that_is_killed_at_random_moments(
    students: Mapping[int, Student], tmp_path: Path
) -> None:
    """The service itself, or a process of vLLM alone, while weights come and sequences are sampled.

    The service is started again each time, and samples what it has not sent.
    """
    moments = random.Random(0)
    (port,) = free_ports(1)
    service = start(students[0], tmp_path / "log", port)
    try:
        with EngineClient([service.address]) as client:
            list(client.sample(order(version_of(students[0], "warm"), LONG)))
            for kill in range(KILLS):
                lineage = f"lineage {kill}"
                orders = [
                    order(version_of(students[number], lineage), limit)
                    for number, limit in ((0, LONG), (1, 40), (2, 40))
                ]
                samples_by_order: list[list[tuple[int, SampledTokens]]] = [[], [], []]

                def ask() -> None:
                    for place, sampling in enumerate([client.sample(entry) for entry in orders]):  # noqa: B023
                        samples_by_order[place] += sampling  # noqa: B023

                asking = threading.Thread(target=ask)
                asking.start()
                threading.Event().wait(moments.uniform(0, 3))
                program = psutil.Process(service.process.pid)
                everything = [program, *program.children(recursive=True)]
                name = ("python", "VLLM::EngineCor")[kill % 2]
                victims = [process for process in everything if process.name().startswith(name)]
                victims[0].kill()
                service.process.wait(60)
                service.close()
                service = start(students[0], tmp_path / "log", port)
                asking.join()
                for sampling_order, sequences in zip(orders, samples_by_order, strict=True):
                    assert_exact(students, sampling_order, sequences)
    finally:
        service.close()
