"""The promises of `WeightChannel`, for each channel, with real trainers and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.runs.started_services import PlacedAddress, PlacedService, write_placed
from protos.rpc.failpoints import arm
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.weight_channel import FileChannel, WeightChannel
from tests.forks import fork
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import assert_same, order, student
from tests.student_trainer.rollout_service.test_service import wait_until
from tests.student_trainer.saving import LIMIT
from tests.student_trainer.teachers.anchors import spread_student

PROBE = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def make_file_channel(student: Any, root: Path, job: str) -> FileChannel:
    return FileChannel(
        make_accelerator(LIMIT),
        student,
        root / job,
        job=job,
        attempt=1,
        dtype=torch.float32,
        adapters=False,
        in_flight="drain",
        probe_ids=PROBE,
        tokens_per_micro_batch=64,
    )


# For each channel a function that makes it, and a failpoint in its `publish`.
CHANNELS: Mapping[str, tuple[Callable[..., WeightChannel], str]] = {
    "file": (make_file_channel, "snapshot-weights-written"),
}


class Trainer:
    """A trainer whose student gets the weights of another model at each step."""

    def __init__(
        self, kind: str, root: Path, job: str, addresses: Sequence[str | PlacedAddress]
    ) -> None:
        self._student: Any = spread_student(student(0))
        self._client = EngineClient(addresses)
        self._channel = CHANNELS[kind][0](self._student, root, job)

    def publish(self, number: int, model: Any) -> WeightsVersion:
        """Publish the weights of `model` as version `number`."""
        self._student.trained.model.load_state_dict(model.state_dict())
        return self._channel.publish(number)

    def assert_sampled(self, version: WeightsVersion, model: Any) -> None:
        """Check that the engines sample a version as this process samples `model`."""
        sent_order = replace(order(version.directory), weights=version)
        sequences = dict(self._client.sample(sent_order))
        parts, total = len(self._client._replicas), len(sent_order.sequences)
        for part in range(parts):
            first, end = total * part // parts, total * (part + 1) // parts
            expected = sample_in_process(
                replace(sent_order, sequences=sent_order.sequences[first:end]), model
            )
            for index, sequence in enumerate(expected, first):
                assert_same(sequences[index], sequence)
                assert sequences[index].versions == ((version.number, len(sequence.token_ids)),)

    def close(self) -> None:
        self._client.close()
        self._channel.close()


@contextmanager
def open_trainer(*arguments: Any) -> Iterator[Trainer]:
    trainer = Trainer(*arguments)
    try:
        yield trainer
    finally:
        trainer.close()


pytestmark = pytest.mark.parametrize("kind", list(CHANNELS))


def test_trainers_use_an_engine_in_turns(
    start_service: StartService, tmp_path: Path, kind: str
) -> None:
    """Each comes back to the engine after the other one has used it."""
    addresses = [start_service().address]
    with (
        open_trainer(kind, tmp_path, "first", addresses) as first,
        open_trainer(kind, tmp_path, "second", addresses) as second,
    ):
        for number in (1, 2, 3):
            for trainer, model in ((first, student(number)), (second, student(10 + number))):
                trainer.assert_sampled(trainer.publish(number, model), model)


def test_trainers_list_the_engines_differently(
    start_service: StartService, tmp_path: Path, kind: str
) -> None:
    """At the same time, in opposite orders, and with names that sort in opposite orders too."""
    ports = [start_service().port for _ in range(2)]
    names = [f"127.0.0.1:{ports[0]}", f"localhost:{ports[1]}"]
    other_names = [f"127.0.0.1:{ports[1]}", f"localhost:{ports[0]}"]

    def train(trainer: Trainer, models: Sequence[Any]) -> None:
        for number, model in enumerate(models):
            trainer.assert_sampled(trainer.publish(number, model), model)

    with (
        open_trainer(kind, tmp_path, "first", names) as first,
        open_trainer(kind, tmp_path, "second", other_names) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        models = [student(number) for number in range(6)]
        trainings = [pool.submit(train, first, models[:3]), pool.submit(train, second, models[3:])]
        for training in trainings:
            training.result()


def stop_in_publish(kind: str, root: Path, address: str, mark: Path, action: str) -> None:
    trainer = Trainer(kind, root, "stopped", [address])
    trainer.assert_sampled(trainer.publish(1, student(1)), student(1))
    arm(f"{CHANNELS[kind][1]}:{action}")
    mark.touch()
    trainer.publish(2, student(2))


@pytest.mark.parametrize("action", ["kill", "sleep:1000"])
def test_a_trainer_that_stops_in_publish_delays_no_other(
    start_service: StartService, tmp_path: Path, kind: str, action: str
) -> None:
    address, mark = start_service().address, tmp_path / "mark"
    stopped = fork(stop_in_publish, kind, tmp_path, address, mark, action)
    try:
        wait_until(mark.exists)
        with open_trainer(kind, tmp_path, "other", [address]) as trainer:
            for number in (1, 2):
                model = student(number)
                trainer.assert_sampled(trainer.publish(number, model), model)
        assert stopped.exitcode in (None, -9)
    finally:
        stopped.kill()
        stopped.join()


def test_an_engine_moves(start_service: StartService, tmp_path: Path, kind: str) -> None:
    """A version of before its move can still be ordered."""
    services = tmp_path / "services.json"
    engine = start_service()
    write_placed(services, [PlacedService(engine.address)], one_machine=False)
    with open_trainer(kind, tmp_path, "run", [PlacedAddress(services, 0)]) as trainer:
        version = trainer.publish(1, student(1))
        trainer.assert_sampled(version, student(1))
        engine.kill()
        moved = start_service("--host", "127.0.0.2")
        write_placed(services, [PlacedService(moved.address)], one_machine=False)
        trainer.assert_sampled(version, student(1))
        trainer.assert_sampled(trainer.publish(2, student(2)), student(2))
