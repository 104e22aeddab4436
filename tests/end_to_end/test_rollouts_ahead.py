"""A rollout engine in its own process: equal bits without lag, and with lag after any kill."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from clients.runs.directory import Control, RunDirectory
from student_trainer.rollout_client.stored_sequences import read_rollouts
from tests.end_to_end.forked_trainer import Forked, finish, kill_after_checkpoint, trainer
from tests.end_to_end.processes import Launched, metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = 12


def lagging_job(material: Material, teacher: str, lag: int, **changes: Any) -> Any:
    from tests.student_trainer.tiny import job

    return job(material, teacher, **{"max_steps": STEPS, "rollouts__lag": lag, **changes})


def curve_of(run: RunDirectory) -> list[dict[str, Any]]:
    from tests.student_trainer.tiny import curve

    return curve(metrics_of(run))


def assert_same(run: RunDirectory, expected: RunDirectory) -> None:
    assert curve_of(run) == curve_of(expected)
    assert weights(run) == weights(expected)


def without_lag(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "rollout/lag"} for line in lines]


def find_service(trainer_pid: int) -> psutil.Process:
    """Return the rollout service that the trainer has started."""
    (service,) = (
        process
        for process in psutil.Process(trainer_pid).children()
        if "student_trainer.rollout_service" in process.cmdline()
    )
    return service


@pytest.fixture(scope="module")
def service_address(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The address of a rollout service for the tests of this module."""
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    log = tmp_path_factory.mktemp("service") / "service.log"
    process = ServiceProcess("--model", str(material.student), log=log)
    yield process.address
    process.close()


def test_without_lag_an_engine_changes_no_bit(
    material: Material, teacher: str, service_address: str, tmp_path: Path
) -> None:
    from tests.student_trainer.tiny import job

    local_run = finish(new_run(tmp_path / "here", job(material, teacher, max_steps=STEPS)))
    engine_config = job(material, teacher, max_steps=STEPS, rollouts__address=service_address)
    engine_run = finish(new_run(tmp_path / "there", engine_config))
    assert without_lag(curve_of(engine_run)) == curve_of(local_run)
    assert {line["rollout/lag"] for line in metrics_of(engine_run)[1:]} == {0.0}
    assert weights(engine_run) == weights(local_run)


@pytest.mark.slow
def test_an_engine_that_sleeps_while_the_trainer_learns(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """A sleeping engine loses its weights, as vLLM does, and each order loads them again."""
    from student_trainer.rollout_service.engines.hf import HfRolloutEngine
    from student_trainer.rollout_service.service import RolloutServicer
    from tests.student_trainer.rollout_service.scripted_service import serve_on_thread
    from tests.student_trainer.tiny import job

    class Sleeper(HfRolloutEngine):
        """An engine whose sleep only clears its weights."""

        slept = 0

        async def sleep(self) -> None:
            self.slept += 1
            for weight in self._model.parameters():
                weight.data.zero_()

    engine = Sleeper(str(material.student))
    engine._info = replace(engine.info, sleeps=True)
    local_run = finish(new_run(tmp_path / "here", job(material, teacher, max_steps=STEPS)))
    with serve_on_thread(RolloutServicer(engine)) as address:
        config = job(material, teacher, max_steps=STEPS, rollouts__address=address)
        engine_run = finish(new_run(tmp_path / "there", config))
    assert without_lag(curve_of(engine_run)) == curve_of(local_run)
    assert weights(engine_run) == weights(local_run)
    assert engine.slept == STEPS


@pytest.mark.slow
def test_adapters_alone_change_no_bit(material: Material, teacher: str, tmp_path: Path) -> None:
    """With `student.lora` the engine has the base model and receives the adapters of each step.

    A service of another rank is refused, and one that takes all weights gets them merged.
    """
    from tests.student_trainer.rollout_service.processes import ServiceProcess
    from tests.student_trainer.tiny import job

    changes: dict[str, Any] = {"max_steps": 4, "student__lora": {"rank": 4}}
    local_run = finish(new_run(tmp_path / "here", job(material, teacher, **changes)))
    options = ("--model", str(material.student))
    services = [
        ServiceProcess(*options, "--lora-rank", rank, log=tmp_path / f"{rank}.log")
        for rank in ("4", "5", "0")
    ]
    try:
        for service, name in zip(services, ("same", "other", "merged"), strict=True):
            config = job(material, teacher, **changes, rollouts__address=service.address)
            run = new_run(tmp_path / name, config)
            if name == "other":
                with trainer(run) as process:
                    assert process.wait() != 0
                assert "accepts adapters of rank 5, but the job has rank 4" in process.log
                continue
            finish(run)
            if name == "same":
                assert without_lag(curve_of(run)) == curve_of(local_run)
                assert weights(run) == weights(local_run)
            else:
                lines = zip(metrics_of(run)[1:], metrics_of(local_run)[1:], strict=True)
                for line, local_line in lines:
                    assert line["loss"] == pytest.approx(local_line["loss"], rel=1e-3)
    finally:
        for service in services:
            service.close()


@pytest.fixture(scope="module")
def lagging_run(
    material: Material, teacher: str, service_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    path = tmp_path_factory.mktemp("ahead") / "run"
    return finish(
        new_run(path, lagging_job(material, teacher, 2, rollouts__address=service_address))
    )


def test_each_step_learns_from_older_weights(lagging_run: RunDirectory) -> None:
    check_lag(lagging_run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 3])
def test_each_step_learns_at_another_lag(
    material: Material, teacher: str, tmp_path: Path, lag: int
) -> None:
    check_lag(finish(new_run(tmp_path / "run", lagging_job(material, teacher, lag))), lag)


def check_lag(run: RunDirectory, lag: int) -> None:
    """Hold the lag and the importance weights of each step; their expected mean is 1 at any lag."""
    lines = metrics_of(run)[1:]
    assert [line["rollout/lag"] for line in lines] == [min(n, lag) for n in range(STEPS)]
    assert sum(line["ratio/mean"] for line in lines) / STEPS == pytest.approx(1, abs=0.1)
    assert any(line["ratio/ess"] < 0.999 for line in lines)


def test_killed_trainers_resume_to_the_same_bits(
    material: Material,
    teacher: str,
    service_address: str,
    lagging_run: RunDirectory,
    tmp_path: Path,
) -> None:
    run = new_run(
        tmp_path / "run", lagging_job(material, teacher, 2, rollouts__address=service_address)
    )
    generator = random.Random(1)
    for attempt, step in enumerate(sorted(generator.sample(range(4, STEPS), 3)), 1):
        with trainer(run, attempt) as process:
            process.wait_for_step(step)
            process.kill()
    with trainer(run, 4, failpoint="snapshot-weights-written:kill:2") as process:
        assert process.wait() == -signal.SIGKILL, process.log
    stored_sequences = read_rollouts(run.checkpoints / f"step-{run.checkpoint_steps()[-1]:06d}")
    assert len(stored_sequences) == 2 * 8, "two steps of eight rollouts"
    finish(run, 5)
    assert_same(run, lagging_run)
    assert not (run.path / "weights").exists()


@pytest.mark.slow
def test_a_killed_engine_is_started_again(
    material: Material, teacher: str, lagging_run: RunDirectory, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", lagging_job(material, teacher, 2))
    with trainer(run) as process:
        assert isinstance(process, Forked)
        for step in (3, 7):
            process.wait_for_step(step, seconds=300)  # the engine is started again
            find_service(process.pid()).kill()
        assert process.wait() == 0, process.log
    assert "the trainer starts the service again" in process.log
    assert_same(run, lagging_run)


@pytest.mark.slow
def test_a_cancel_leaves_the_engine_to_the_trainer(
    material: Material, teacher: str, lagging_run: RunDirectory, tmp_path: Path
) -> None:
    """A server cancels by SIGTERM to the trainer's process group; the checkpoint needs the engine.

    So each attempt stops with whole steps and the answers of later ones, and the last one has the
    bits of a run that was not cancelled.
    """
    run = new_run(tmp_path / "run", lagging_job(material, teacher, 2))
    for attempt, step in enumerate((1, 4, 6), 1):
        process = Launched(run, attempt)
        try:
            process.wait_for_step(step)
            os.killpg(process._process.pid, signal.SIGTERM)
            assert process.wait() == 0, process.log
        finally:
            process.kill()
        status = run.read_status()
        assert status is not None
        assert status.verdict == "cancelled", process.log
        assert "the trainer starts the service again" not in process.log
        stored_sequences = read_rollouts(run.checkpoints / f"step-{run.checkpoint_steps()[-1]:06d}")
        assert len(stored_sequences) == 2 * 8, "two steps of eight rollouts"
    finish(run, 4)
    assert_same(run, lagging_run)


@pytest.mark.slow
def test_two_processes_and_reinforcement(material: Material, tmp_path: Path) -> None:
    from tests.student_trainer.tiny import rl_job

    changes: dict[str, Any] = {"rollouts__lag": 1, "train__processes": 2, "max_steps": 6}
    expected_run = finish(new_run(tmp_path / "expected", rl_job(material, **changes)))
    run = new_run(tmp_path / "run", rl_job(material, **changes))
    kill_after_checkpoint(run)
    finish(run, 2)
    assert_same(run, expected_run)
    assert [line["rollout/lag"] for line in metrics_of(run)[1:]] == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_step_that_fails_keeps_its_rollouts(
    material: Material, service_address: str, lagging_run: RunDirectory, tmp_path: Path
) -> None:
    """The teacher stops. The rollouts of the failed step are kept, as their weights are gone."""
    from tests.end_to_end.test_teacher_killed import PATIENCE, MortalTeacher

    mortal = MortalTeacher(material, tmp_path / "teacher.log")
    changes = {"rollouts__address": service_address, "teacher__patience_seconds": PATIENCE}
    run = new_run(tmp_path / "run", lagging_job(material, mortal.address, 2, **changes))
    with trainer(run) as process:
        process.wait_for_step(5)
        mortal.kill()
        assert process.wait() != 0
    newest = run.checkpoints / f"step-{run.checkpoint_steps()[-1]:06d}"
    assert len(read_rollouts(newest)) >= 2 * 8
    mortal.start()
    finish(run, 2)
    mortal.kill()
    assert_same(run, lagging_run)


@pytest.mark.slow
def test_a_slow_teacher_bounds_what_is_sampled(
    material: Material, lagging_run: RunDirectory, tmp_path: Path
) -> None:
    """The engine samples `lag` + 1 steps ahead of training at most, and then waits."""
    from tests.end_to_end.test_teacher_killed import MortalTeacher
    from tests.scraping import metrics_address, scrape
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    log, lag, answers_per_step, evaluation_prompts = tmp_path / "service.log", 2, 8, 16
    service = ServiceProcess("--model", str(material.student), "--metrics-port", "0", log=log)
    metrics_page = metrics_address(log)
    mortal = MortalTeacher(material, tmp_path / "teacher.log")
    run = new_run(
        tmp_path / "run",
        lagging_job(material, mortal.address, lag, rollouts__address=service.address),
    )
    try:
        with trainer(run) as process:
            process.wait_for_step(3)
            mortal.kill()
            learned_step, unchanged_looks = 0, 0
            while unchanged_looks < 20:  # polls in a row that find the maximum and no new step
                sampled = scrape(metrics_page)["distill_rollouts_sequences_total"]
                step_before, learned_step = learned_step, metrics_of(run)[-1]["step"]
                max_sampled = evaluation_prompts + (learned_step + 1 + lag) * answers_per_step
                assert sampled <= max_sampled
                unchanged_looks = (
                    unchanged_looks + 1
                    if sampled == max_sampled and learned_step == step_before
                    else 0
                )
                time.sleep(0.05)
            assert learned_step < STEPS - lag
            mortal.start()
            assert process.wait() == 0, process.log
    finally:
        mortal.kill()
        service.close()
    assert_same(run, lagging_run)


@pytest.mark.slow
def test_a_cancelled_job_does_not_wait_for_a_hung_engine(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """Its last finished step is saved before a server would kill the trainer; it can be resumed."""
    from tests.student_trainer.rollout_service.processes import ServiceProcess

    service = ServiceProcess("--model", str(material.student), log=tmp_path / "service.log")
    changes = {"rollouts__address": service.address, "checkpoint__every": 1000, "max_steps": 200}
    run = new_run(tmp_path / "run", lagging_job(material, teacher, 2, **changes))
    try:
        with trainer(run) as process:
            process.wait_for_step(3)
            service.send(signal.SIGSTOP)
            run.write_control(Control(stop="checkpoint"))
            process.wait()
        last_step = metrics_of(run)[-1]["step"]
        assert list(run.checkpoint_steps()) == [last_step], process.log
        service.send(signal.SIGCONT)
        run.write_control(Control())
        with trainer(run, 2) as process:
            process.wait_for_step(last_step + 4)
    finally:
        service.close()
