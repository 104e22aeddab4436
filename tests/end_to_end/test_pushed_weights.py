"""Jobs that push weights to engines through a process group equal jobs that write files."""

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
def run_with_files(
    material: Material, teacher: str, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A run with a lag of one step, whose engine loads the weights from files."""
    return finish(
        new_run(tmp_path_factory.mktemp("files") / "run", make_job(material, teacher, "file"))
    )


def make_job(material: Material, teacher: str, push: str, **changes: Any) -> Any:
    from tests.student_trainer import tiny

    options = {"max_steps": STEPS, "rollouts__lag": 1, "rollouts__push": push, **changes}
    return tiny.job(material, teacher, **options)


@pytest.mark.slow
def test_a_job_that_pushes_has_the_bits_of_one_with_files(
    material: Material, teacher: str, run_with_files: RunDirectory, tmp_path: Path
) -> None:
    """With push, only evaluations write files."""
    run = finish(new_run(tmp_path / "run", make_job(material, teacher, "broadcast")))
    assert_same(run, run_with_files)


@pytest.mark.slow
def test_a_push_waits_for_the_orders_before_it(
    material: Material, teacher: str, run_with_files: RunDirectory, tmp_path: Path
) -> None:
    """Each sampling order reaches its engine later than a step takes."""
    run = new_run(tmp_path / "run", make_job(material, teacher, "broadcast"))
    with trainer(run, failpoint="order-due:sleep:1") as process:
        assert process.wait() == 0, process.log
    assert "is not loaded here" not in process.log
    assert_same(run, run_with_files)


@pytest.mark.slow
def test_processes_that_share_the_weights_push_them(material: Material, tmp_path: Path) -> None:
    """FSDP2: the first process gathers each layer with the others, and sends it."""
    from tests.student_trainer.tiny import rl_job

    changes: dict[str, Any] = {"rollouts__lag": 1, "train__processes": 2, "max_steps": 4}
    changes["train__sharding"] = "fsdp2"
    expected_run = finish(new_run(tmp_path / "expected", rl_job(material, **changes)))
    run = finish(new_run(tmp_path / "run", rl_job(material, **changes, rollouts__push="broadcast")))
    assert_same(run, expected_run)


@pytest.mark.slow
def test_killed_trainers_resume_to_the_same_bits(
    material: Material, teacher: str, run_with_files: RunDirectory, tmp_path: Path
) -> None:
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    service = ServiceProcess("--model", str(material.student), log=tmp_path / "service.log")
    config = make_job(material, teacher, "broadcast", rollouts__address=service.address)
    run = new_run(tmp_path / "run", config)
    try:
        for attempt, failpoint in enumerate(("bucket-sent:kill:5", "weights-sent:kill:3"), 1):
            with trainer(run, attempt, failpoint=failpoint) as process:
                assert process.wait() == -signal.SIGKILL, process.log
        finish(run, 3)
    finally:
        service.close()
    assert_same(run, run_with_files)


@pytest.mark.slow
def test_the_only_engine_is_killed_without_a_lag(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The trainer writes the weights of the step as files for the restarted engine."""
    changes = {"rollouts__lag": 0, "method__max_new_tokens": 16}
    run_with_files = finish(
        new_run(tmp_path / "here", make_job(material, teacher, "file", **changes))
    )
    from protos.rpc.ports import free_ports
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    (port,) = free_ports(1)
    options, log = ("--model", str(material.student)), tmp_path / "service.log"
    # Killed in the middle of an order, after its weights were pushed.
    service = ServiceProcess(*options, log=log, port=port, failpoint="batch-sampled:kill:9")
    address = {"rollouts__address": service.address}
    run = new_run(tmp_path / "run", make_job(material, teacher, "broadcast", **changes, **address))
    try:
        with trainer(run) as process:
            assert service.process.wait(300) == -signal.SIGKILL
            service.close()
            service = ServiceProcess(*options, log=log, port=port)
            assert process.wait() == 0, process.log
            log_text = process.log
    finally:
        service.close()
    assert without_lag(curve_of(run)) == without_lag(curve_of(run_with_files))
    assert "is written as files" in log_text


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The job ends, and the lag of each step stays within the limit."""
    run = new_run(tmp_path / "run", make_job(material, teacher, "broadcast"))
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
