"""Evaluations as jobs: the results of `distill eval`, and the same bits after kills."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

from clients.config.evaluation import EvalJob
from clients.config.kinds import parse_job
from clients.jobs.artifacts import pull_run
from clients.jobs.record import record_of_run
from clients.preflight.files import check_here
from clients.runs.directory import Control, RunDirectory
from protos.errors import InvalidInput
from student_trainer.exam.evaluation import run as run_exam
from student_trainer.exam.job import build_exam_config
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, trainer
from tests.end_to_end.processes import ENVIRONMENT, metrics_of, new_run

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# 8192 answers, in more than one batch of student_trainer/exam/local_model.py.
PROMPTS, SAMPLES = 256, 32


def make_eval_job(material: Material, **changes: Any) -> EvalJob:
    """Answers that contain a 1 are right; a random student gives some of them."""
    values: dict[str, Any] = {
        "student": {"model": str(material.student)},
        "data": {"path": str(material.prompts)},
        "reward": {"type": "regex", "pattern": "1"},
        "method": {
            "type": "eval",
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "max_new_tokens": 6,
            "temperature": 5.0,
        },
        "seed": 3,
    }
    return EvalJob.model_validate(values | changes)


def result_digests(run: RunDirectory) -> list[str]:
    files = (run.evaluation / name for name in ("result.json", "student/judged.parquet"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.fixture
def undisturbed(material: Material, once: Once) -> RunDirectory:
    return RunDirectory(once("eval", lambda path: finish(new_run(path, make_eval_job(material)))))


@pytest.mark.slow
def test_the_results_are_those_of_the_command(
    material: Material, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    record = record_of_run(undisturbed.path)
    last_line = metrics_of(undisturbed)[-1]
    assert (record.job.kind, last_line["step"]) == ("eval", PROMPTS * SAMPLES)
    config = build_exam_config(make_eval_job(material), RunDirectory(tmp_path))
    (row,) = run_exam(config)
    result = json.loads((undisturbed.evaluation / "result.json").read_text())
    assert result == {"models": [row]}
    table = pyarrow.parquet.read_table(undisturbed.evaluation / "student" / "judged.parquet")
    rewards = [answer["reward"] for answer in table.to_pylist()]
    assert len(rewards) == PROMPTS * SAMPLES
    assert last_line["eval/accuracy"] == pytest.approx(sum(rewards) / len(rewards))
    assert 0 < last_line["eval/accuracy"] < last_line[f"eval/pass@{SAMPLES}"] <= 1
    assert (undisturbed.path / "environment.json").exists()
    pulled_path = pull_run(undisturbed.path, tmp_path / "pulled")
    assert json.loads((pulled_path / "result.json").read_text()) == result


def test_killed_and_cancelled_it_comes_to_the_same_bits(
    material: Material, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", make_eval_job(material))
    with trainer(run, 1, failpoint="answers-stored:kill:1") as process:
        assert process.wait() < 0
    run.write_control(Control("checkpoint"))
    with trainer(run, 2) as process:
        assert process.wait() == 0, process.log
    status = run.read_status()
    assert status is not None
    assert status.verdict == "cancelled"
    assert 0 < status.step < PROMPTS * SAMPLES, "the first batch is kept"
    run.write_control(Control())
    finish(run, 3)
    assert result_digests(run) == result_digests(undisturbed)
    steps = [line["step"] for line in metrics_of(run)]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_an_anchor_is_evaluated_too(material: Material, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(material.student, model)
    shutil.copytree(material.teacher, model / "anchor")
    method = {"type": "eval", "prompts": 4, "samples": 2, "max_new_tokens": 6}
    job = make_eval_job(material, student={"model": str(model)}, method=method)
    run = finish(new_run(tmp_path / "run", job))
    student, anchor = json.loads((run.evaluation / "result.json").read_text())["models"]
    last_line = metrics_of(run)[-1]
    assert last_line["step"] == 2 * 4 * 2
    assert last_line["eval/accuracy"] == student["pass@1"]["mean"]
    assert last_line["eval/anchor/accuracy"] == anchor["pass@1"]["mean"]
    assert "gain" in anchor


def test_another_model_under_the_answers_is_refused(material: Material, tmp_path: Path) -> None:
    """An evaluation must not mix the answers of two models."""
    model = tmp_path / "model"
    shutil.copytree(material.student, model)
    method = {"type": "eval", "prompts": 4, "samples": 2, "max_new_tokens": 6}
    run = new_run(
        tmp_path / "run", make_eval_job(material, student={"model": str(model)}, method=method)
    )
    with trainer(run, 1, failpoint="answers-stored:kill") as process:
        assert process.wait() < 0
    shutil.copy(material.student / "model.safetensors", model)
    with trainer(run, 2) as process:
        assert process.wait() == 2
    status = run.read_status()
    assert status is not None
    assert "has changed since the first attempt; submit the job" in status.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"path": "DATA", "answer_column": "x"}}, "data.answer_column: .*no column 'x'"),
        ({"student": {"model": "DIRECTORY"}}, "student.model: no config.json in"),
        ({"data": {"path": "absent.jsonl"}}, "data.path: no such file: absent.jsonl"),
        ({"data": {"path": "DATA", "system": "Add."}}, "data.system: .*no chat template"),
    ],
)
def test_refused_before_it_is_queued(
    material: Material, tmp_path: Path, change: dict[str, dict[str, str]], message: str
) -> None:
    names = {"DATA": str(material.prompts), "DIRECTORY": str(tmp_path)}
    tables = {
        table: {key: names.get(value, value) for key, value in keys.items()}
        for table, keys in change.items()
    }
    job = make_eval_job(material, **{"reward": {"type": "exact_match"}, **tables})
    with pytest.raises(InvalidInput, match=message):
        check_here(job, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "only the reward reasoning_gym:TASK"),
        ({"reward": {"type": "reasoning_gym:chain_sum"}}, "generates its prompts"),
        ({"data": {"path": "x", "eval_path": "y"}}, "an evaluation reads data.path"),
        ({"data": {"path": "@rows/store"}}, "cannot be the output of a job"),
        ({"max_steps": 3}, "Extra inputs"),
    ],
)
def test_keys_without_a_use(material: Material, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_eval_job(material, **change)


@pytest.mark.slow
def test_the_command_runs_it(material: Material, tmp_path: Path) -> None:
    method = {"type": "eval", "prompts": 8, "samples": 4, "max_new_tokens": 6, "temperature": 5.0}
    job = make_eval_job(material, method=method)
    (tmp_path / "job.toml").write_text(
        f'student.model = "{material.student}"\ndata.path = "{material.prompts}"\nseed = 3\n'
        'reward = { type = "regex", pattern = "1" }\n'
        '[method]\ntype = "eval"\nprompts = 8\nsamples = 4\nmax_new_tokens = 6\ntemperature = 5.0\n'
    )
    command = [sys.executable, "-m", "clients", "run", "job.toml"]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    (run,) = (tmp_path / "runs").glob("eval-distill-*")
    assert parse_job((run / "job.json").read_text()) == job
    mean_accuracy = json.loads((run / "eval" / "result.json").read_text())["models"][0]["pass@1"][
        "mean"
    ]
    last_line = process.stdout.splitlines()[-1]
    assert f"SUCCEEDED  32/32 steps  eval/accuracy {mean_accuracy:.4g}" in last_line
    assert last_line.endswith(f"results runs/{run.name}/eval")
