"""Prompts that name their teacher, and replicated teachers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory
from protos.errors import ExitCode
from tests.end_to_end.conftest import teacher_arguments
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = 4


def make_job(material: Material, **changes: Any) -> OnPolicyJob:
    from tests.student_trainer.tiny import job

    return job(material, max_steps=STEPS, **changes)


@pytest.fixture(scope="module")
def single_teacher_run(
    material: Material, teacher: str, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A run with one teacher, without interruption."""
    path = tmp_path_factory.mktemp("plain") / "run"
    return finish(new_run(path, make_job(material, teacher__address=teacher)))


@pytest.fixture
def routed_material(material: Material, tmp_path: Path) -> Material:
    """The prompts of `material`, in turn for the teachers `sums` and `rest`."""
    from tests.student_trainer.tiny import Material

    records = [json.loads(line) for line in material.prompts.read_text().splitlines()]
    lines = [
        json.dumps(record | {"teacher": "rest" if number % 2 else "sums"}) + "\n"
        for number, record in enumerate(records)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(lines))
    return Material(prompts, material.teacher, material.student)


@pytest.fixture
def other_teacher(tmp_path: Path) -> Iterator[str]:
    """A teacher with the same tokenizer and other weights."""
    from tests.student_trainer.tiny import model, save, tokenizer

    path = save(model(seed=7, layers=2), tokenizer(), tmp_path / "other")
    arguments = ["--model", str(path), "--batch-invariant", "--no-cache"]
    process = ForkedTeacher(arguments, log=tmp_path / "other.log")
    yield process.address
    process.close()


def test_each_prompt_is_scored_by_the_teacher_it_names(
    routed_material: Material,
    single_teacher_run: RunDirectory,
    teacher: str,
    other_teacher: str,
    tmp_path: Path,
) -> None:
    def run_job(name: str, **changes: Any) -> RunDirectory:
        return finish(new_run(tmp_path / name, make_job(routed_material, **changes)))

    same_teacher_run = run_job("same", teachers={"sums": teacher, "rest": teacher})
    two_teachers_run = run_job("two", teachers={"sums": teacher, "rest": other_teacher})
    assert weights(same_teacher_run) == weights(single_teacher_run), (
        "one teacher under two names is one teacher"
    )
    assert weights(two_teachers_run) != weights(single_teacher_run)
    (same_teacher_line,), (two_teachers_line,) = [
        [line for line in metrics_of(run) if line["step"] == 1]
        for run in (same_teacher_run, two_teachers_run)
    ]
    # In the first step both runs have the same student and answers.
    assert two_teachers_line["kl/teacher/sums"] == same_teacher_line["kl/teacher/sums"]
    assert two_teachers_line["kl/teacher/rest"] != same_teacher_line["kl/teacher/rest"]
    for line in (same_teacher_line, two_teachers_line):
        low, high = sorted((line["kl/teacher/sums"], line["kl/teacher/rest"]))
        assert low < line["kl/teacher"] < high
    assert not any(
        "kl/teacher/" in name for line in metrics_of(single_teacher_run) for name in line
    )


def test_a_teacher_that_dies_is_replaced_by_another(
    material: Material, single_teacher_run: RunDirectory, teacher: str, tmp_path: Path
) -> None:
    """The run has the same bits although nobody restarts the first teacher."""
    dying_teacher = ForkedTeacher(teacher_arguments(material), log=tmp_path / "mortal.log")
    addresses = [dying_teacher.address, teacher]
    run = new_run(tmp_path / "run", make_job(material, teacher__address=addresses))
    with trainer(run) as process:
        process.wait_for_step(1)
        dying_teacher.close()
        assert process.wait() == 0, process.log
    assert weights(run) == weights(single_teacher_run)


def test_every_teacher_is_checked(routed_material: Material, teacher: str, tmp_path: Path) -> None:
    other_vocabulary_teacher = ForkedTeacher(
        ["--engine", "fake", "--model", "vocab=13", "--no-cache"], log=tmp_path / "stranger.log"
    )
    addresses = {"sums": teacher, "rest": other_vocabulary_teacher.address}
    run = new_run(tmp_path / "run", make_job(routed_material, teachers=addresses, teacher__top_k=4))
    with trainer(run) as process:
        assert process.wait() == ExitCode.WRONG_STATE, process.log
    other_vocabulary_teacher.close()
    status = run.read_status()
    assert status is not None
    assert "the tokenizers differ" in status.reason
    assert "use a student with the teacher rest's tokenizer" in status.reason


def test_a_name_without_a_teacher(routed_material: Material, teacher: str, tmp_path: Path) -> None:
    run = new_run(
        tmp_path / "run", make_job(routed_material, teachers={"sums": teacher, "poems": teacher})
    )
    with trainer(run) as process:
        assert process.wait() == ExitCode.USAGE, process.log
    status = run.read_status()
    assert status is not None
    assert status.step == 0
    assert status.reason.startswith("data.teacher_column: row 2 of ")
    assert "names the teacher 'rest'; the job has poems, sums" in status.reason
