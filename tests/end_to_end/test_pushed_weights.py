"""Jobs whose weights go to the engines through a process group: the bits are those of files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import metrics_of, new_run
from tests.end_to_end.test_rollouts_ahead import (
    assert_same,
    curve_of,
    services_of_trainers,
    without_lag,
)

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material


STEPS = 8


@pytest.fixture(scope="module")
def files(
    material: Material, teacher: str, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A run with a lag of one step whose engine loads files."""
    return finish(new_run(tmp_path_factory.mktemp("files") / "run", job(material, teacher, "file")))


def job(material: Material, teacher: str, push: str, **changes: Any) -> Any:
    from tests.student_trainer import tiny

    given = {"max_steps": STEPS, "rollouts__lag": 1, "rollouts__push": push, **changes}
    return tiny.job(material, teacher, **given)


@pytest.mark.slow
def test_a_job_that_pushes_has_the_bits_of_one_with_files(
    material: Material, teacher: str, files: RunDirectory, tmp_path: Path
) -> None:
    """Only evaluations write files."""
    run = finish(new_run(tmp_path / "run", job(material, teacher, "broadcast")))
    assert_same(run, files)


@pytest.mark.slow
def test_a_push_waits_for_the_orders_before_it(
    material: Material, teacher: str, files: RunDirectory, tmp_path: Path
) -> None:
    """Each order takes longer to its engine than a step does."""
    run = new_run(tmp_path / "run", job(material, teacher, "broadcast"))
    with trainer(run, failpoint="order-due:sleep:1") as process:
        assert process.wait() == 0, process.log
    assert "is not loaded here" not in process.log
    assert_same(run, files)


@pytest.mark.slow
def test_processes_that_share_the_weights_push_them(material: Material, tmp_path: Path) -> None:
    """FSDP2: the first process gathers each layer with the others, and sends it."""
    from tests.student_trainer.tiny import rl_job

    changes: dict[str, Any] = {"rollouts__lag": 1, "train__processes": 2, "max_steps": 4}
    changes["train__sharding"] = "fsdp2"
    expected = finish(new_run(tmp_path / "expected", rl_job(material, **changes)))
    run = finish(new_run(tmp_path / "run", rl_job(material, **changes, rollouts__push="broadcast")))
    assert_same(run, expected)


@pytest.mark.slow
def test_killed_trainers_resume_to_the_same_bits(
    material: Material, teacher: str, files: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    service = ServiceProcess("--model", str(material.student), log=tmp_path / "service.log")
    config = job(material, teacher, "broadcast", rollouts__address=service.address)
    run = new_run(tmp_path / "run", config)
    try:
        for attempt, failpoint in enumerate(("bucket-sent:kill:5", "weights-sent:kill:3"), 1):
            with trainer(run, attempt, failpoint=failpoint) as process:
                assert process.wait() == -signal.SIGKILL, process.log
        finish(run, 3)
    finally:
        service.close()
    assert_same(run, files)


@pytest.mark.slow
def test_the_only_engine_is_killed_without_a_lag(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The trainer still has the weights of the step, and writes them for the engine's successor."""
    changes = {"rollouts__lag": 0, "method__max_new_tokens": 16}
    here = finish(new_run(tmp_path / "here", job(material, teacher, "file", **changes)))
    from protos.rpc.ports import free_ports
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    (port,) = free_ports(1)
    options, log = ("--model", str(material.student)), tmp_path / "service.log"
    # Killed in the middle of an order, after its weights were pushed.
    service = ServiceProcess(*options, log=log, port=port, failpoint="batch-sampled:kill:9")
    address = {"rollouts__address": service.address}
    run = new_run(tmp_path / "run", job(material, teacher, "broadcast", **changes, **address))
    try:
        with trainer(run) as process:
            assert service.process.wait(300) == -signal.SIGKILL
            service.close()
            service = ServiceProcess(*options, log=log, port=port)
            assert process.wait() == 0, process.log
            said = process.log
    finally:
        service.close()
    assert without_lag(curve_of(run)) == without_lag(curve_of(here))
    assert "is written as files" in said


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The job ends, and each answer was sampled with weights that its step may learn from."""
    run = new_run(tmp_path / "run", job(material, teacher, "broadcast"))
    with trainer(run) as process:
        for step in (2, 5):
            process.wait_for_step(step, seconds=300)
            for service in services_of_trainers():
                service.send_signal(signal.SIGKILL)
        assert process.wait() == 0, process.log
    assert "it is started again" in process.log
    lines = metrics_of(run)[1:]
    assert len(lines) == STEPS
    assert all(0 <= line["rollout/lag"] <= 1 for line in lines)
