"""Jobs that share a rollout service, with any names of run directories."""

from __future__ import annotations

from pathlib import Path

from clients.config.on_policy import OnPolicyJob
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.rollout_client.connection import EngineConnection, connect_engine
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.order import Order
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import assert_same, order, student
from tests.student_trainer.saving import LIMIT
from tests.student_trainer.teachers.anchors import spread_student


def engine_of(number: int, run: Path, address: str, material: tiny.Material) -> EngineConnection:
    """Connect the first attempt of a run whose student is `student(number)`."""
    config: OnPolicyJob = tiny.job(material, rollouts__address=address)
    services = RolloutServices([address], "")
    model = spread_student(student(number))
    accelerator = make_accelerator(LIMIT)
    engine = connect_engine(config, services, accelerator, model, run, 1, tiny.tokenizer())
    assert engine is not None
    return engine


def test_runs_of_the_same_name_have_their_own_weights(
    start_service: StartService, tmp_path: Path
) -> None:
    """For example a directory that was deleted and reused, or two machines with equal run names."""
    address = start_service().address
    material = tiny.Material.at(tmp_path)
    for number in (1, 2):
        run = tmp_path / str(number) / "run"
        run.mkdir(parents=True)
        engine = engine_of(number, run, address, material)
        weights = engine.channel.publish(0)
        plain_order = order(weights.directory)
        with engine.client:
            sequences = dict(
                engine.client.sample(Order(weights, plain_order.settings, plain_order.sequences))
            )
        engine.channel.close()
        for index, expected in enumerate(sample_in_process(plain_order, student(number))):
            assert_same(sequences[index], expected)
