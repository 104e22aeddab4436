"""`kill -9` of the teacher in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.runs.directory import Control, RunDirectory, Status, replace_file
from protos.errors import ExitCode
from tests.distill_server.conftest import eventually
from tests.end_to_end.conftest import teacher_arguments
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish, kill_after_checkpoint, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

PATIENCE = 3.5  # enough for the first answer of an evaluation on a busy machine


class MortalTeacher:
    """A teacher that can be killed and started again on the same port."""

    def __init__(self, material: Material, log: Path) -> None:
        self._arguments, self._log = teacher_arguments(material), log
        self._process = ForkedTeacher(self._arguments, log=log)
        self.address = self._process.address

    def kill(self) -> None:
        self._process.close()

    def start(self) -> None:
        self._process = ForkedTeacher(
            self._arguments, log=self._log, port=int(self.address.rsplit(":", 1)[1])
        )


@pytest.fixture
def mortal_teacher(material: Material, tmp_path: Path) -> Iterator[MortalTeacher]:
    teacher = MortalTeacher(material, tmp_path / "teacher.log")
    yield teacher
    teacher.kill()


def test_the_job_outlives_its_teacher(
    material: Material, mortal_teacher: MortalTeacher, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """The teacher is killed and restarted twice: no row is missing or counted twice."""
    from tests.student_trainer.tiny import curve, job

    run = new_run(tmp_path / "run", job(material, mortal_teacher.address))
    with trainer(run) as process:
        for step in (5, 25):
            process.wait_for_step(step)
            mortal_teacher.kill()
            step_before = metrics_of(run)[-1]["step"]
            mortal_teacher.start()
            process.wait_for_step(step_before + 2)
        assert process.wait() == 0, process.log
        assert "Warning" not in process.log
    lines = metrics_of(run)
    assert curve(lines) == curve(metrics_of(undisturbed))
    assert {line["attempt"] for line in lines} == {1}, "the trainer itself never stopped"
    assert weights(run) == weights(undisturbed)
    wait_seconds = [line["time/teacher_wait"] for line in lines if "time/teacher_wait" in line]
    print(f"the longest waits for the teacher: {sorted(wait_seconds)[-2:]} s")


@pytest.mark.slow
def test_a_teacher_that_stays_away(
    material: Material, mortal_teacher: MortalTeacher, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """The job fails in time, names the teacher, and resumes where it was."""
    from tests.student_trainer.tiny import job

    run = new_run(
        tmp_path / "run", job(material, mortal_teacher.address, teacher__patience_seconds=PATIENCE)
    )
    with trainer(run) as process:
        process.wait_for_step(21)
        mortal_teacher.kill()
        assert process.wait() == ExitCode.UNREACHABLE, process.log
    status = assert_told_failure(run)
    if (
        status.phase == "saving"
    ):  # lost in a step or in the evaluation after it: no step is repeated
        assert newest_checkpoint_step(run) - metrics_of(run)[-1]["step"] in (0, 1)
    resume_with_teacher(run, mortal_teacher, undisturbed)


@pytest.mark.slow
def test_a_stop_request_ends_the_wait_for_a_teacher(
    material: Material,
    mortal_teacher: MortalTeacher,
    undisturbed: RunDirectory,
    tmp_path: Path,
) -> None:
    """The teacher is away, with a long patience: the steps before are saved, and none is lost."""
    from tests.student_trainer.tiny import job

    changes = {"checkpoint__every": 1000, "teacher__patience_seconds": 600}
    run = new_run(tmp_path / "run", job(material, mortal_teacher.address, **changes))
    with trainer(run) as process:
        process.wait_for_step(6)
        mortal_teacher.kill()
        run.write_control(Control(stop="checkpoint"))
        process.wait()
    saved_steps = list(run.checkpoint_steps())
    assert saved_steps in ([metrics_of(run)[-1]["step"]], [metrics_of(run)[-1]["step"] + 1])
    run.write_control(Control())
    resume_with_teacher(run, mortal_teacher, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_interval", [3, 4])
def test_a_teacher_that_stays_away_from_an_evaluation(
    material: Material,
    mortal_teacher: MortalTeacher,
    teacher: str,
    tmp_path: Path,
    checkpoint_interval: int,
) -> None:
    """The checkpoint of step 4 is saved; the next attempt repeats the lost evaluation."""
    from tests.student_trainer.tiny import job

    # The evaluation takes a second, in which the teacher is killed.
    changes = {
        "max_steps": 8,
        "eval__every": 4,
        "eval__prompts": 250,
        "checkpoint__every": checkpoint_interval,
    }
    expected_run = finish(new_run(tmp_path / "straight", job(material, teacher, **changes)))
    config = job(material, mortal_teacher.address, **changes, teacher__patience_seconds=PATIENCE)
    run = new_run(tmp_path / "run", config)
    with trainer(run) as process:
        process.wait_for_step(3)
        eventually(lambda: is_evaluating(run), 60)
        mortal_teacher.kill()
        assert process.wait() == ExitCode.UNREACHABLE, process.log
    assert_told_failure(run)
    assert (newest_checkpoint_step(run), metrics_of(run)[-1]["step"]) == (4, 3)
    resume_with_teacher(run, mortal_teacher, expected_run)
    assert [line["step"] for line in metrics_of(run)] == list(range(9))


def is_evaluating(run: RunDirectory) -> bool:
    status = run.read_status()
    return status is not None and (status.phase, status.step) == ("evaluating", 4)


def assert_told_failure(run: RunDirectory) -> Status:
    status = run.read_status()
    assert status is not None
    assert (status.verdict, status.code) == ("failed", "UNAVAILABLE")
    assert f"has not answered for {PATIENCE} s" in status.reason
    assert "start the teacher again" in status.reason
    return status


def newest_checkpoint_step(run: RunDirectory) -> int:
    return max(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))


def resume_with_teacher(
    run: RunDirectory, mortal_teacher: MortalTeacher, expected_run: RunDirectory
) -> None:
    from tests.student_trainer.tiny import curve

    mortal_teacher.start()
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(expected_run))
    assert weights(run) == weights(expected_run)


@pytest.mark.slow
def test_two_processes_lose_their_teacher(
    material: Material, mortal_teacher: MortalTeacher, tmp_path: Path
) -> None:
    """Neither process waits forever for the other; both resume."""
    from tests.student_trainer.tiny import job

    config = job(
        material,
        mortal_teacher.address,
        max_steps=30,
        train__processes=2,
        teacher__patience_seconds=PATIENCE,
    )
    run = new_run(tmp_path / "run", config)
    with trainer(run) as process:
        process.wait_for_step(4)
        mortal_teacher.kill()
        assert process.wait() != 0
    status = run.read_status()
    assert status is not None
    assert (status.verdict, status.code) == ("failed", "UNAVAILABLE")
    assert "teacher" in status.reason
    mortal_teacher.start()
    finish(run, 2)
    assert [line["step"] for line in metrics_of(run)] == list(range(31))


def test_another_teacher_at_the_address_is_told(
    material: Material, teacher: str, tmp_path: Path
) -> None:
    """The job resumes with other weights at its address; the same teacher is no news."""
    from tests.student_trainer.tiny import Material, job, model, save, tokenizer

    other_model = save(model(seed=77), tokenizer(), tmp_path / "other")
    other_material = Material(material.prompts, other_model, material.student)
    other_teacher = MortalTeacher(other_material, tmp_path / "other.log")
    try:
        run = new_run(tmp_path / "run", job(material, teacher, max_steps=2, checkpoint__every=1))
        kill_after_checkpoint(run)
        again = finish(run, 2)
        assert read_reason(again) == ""
        moved = job(material, other_teacher.address, max_steps=4, checkpoint__every=1)
        replace_file(run.job_json, moved.model_dump_json())
        reason = read_reason(finish(run, 3))
        assert "has another fingerprint than the teacher of the steps up to 2" in reason
    finally:
        other_teacher.kill()


def read_reason(run: RunDirectory) -> str:
    status = run.read_status()
    assert status is not None
    return status.reason
