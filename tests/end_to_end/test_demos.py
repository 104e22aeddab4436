"""`distill demo` and `distill demo-rl` with their models and real processes, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.demo_models import measure_accuracy
from benchmarks.shared.programs import set_options
from clients.cli.app import main
from clients.cli.demos.demo import MODELS
from protos.errors import ExitCode
from student_trainer.tools import addition

DEMO = {"max_steps": "20", "train.warmup_steps": "5", "eval.every": "20", "eval.prompts": "250"}
DEMO_RL = {
    "max_steps": "15",
    "train.learning_rate": "1e-3",
    "train.prompts_per_step": "32",
    "eval.prompts": "250",
    "eval.every": "15",
}


def test_the_shipped_teacher_is_right_and_the_student_is_not(tmp_path: Path) -> None:
    addition.write(tmp_path, seed=0)
    held_out = tmp_path / "heldout.jsonl"
    assert measure_accuracy(MODELS / "teacher", held_out) >= 0.99
    assert 0.1 < measure_accuracy(MODELS / "student", held_out) < 0.4


def run_demo(runs: Path, options: Mapping[str, str], *command: str) -> Any:
    """Run a demo and return its summary."""
    assert main([*command, "--runs", str(runs), *set_options(options)]) == ExitCode.OK
    return json.loads((runs / "summary.json").read_text())


@pytest.mark.usefixtures("forked_python")
def test_the_demo_raises_the_accuracy_of_its_student(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_directory = tmp_path / "demo"
    summary = run_demo(demo_directory, DEMO, "--json", "demo")
    assert json.loads(capsys.readouterr().out) == summary
    assert summary["teacher_accuracy"] >= 0.99
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.3
    assert summary["kl_after"] < summary["kl_before"]
    for name in ("teacher/model.safetensors", "student/tokenizer.json", "export/config.json"):
        assert (demo_directory / name).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_rewards_raise_the_accuracy_of_the_same_student(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_directory = tmp_path / "demo"
    summary = run_demo(demo_directory, DEMO_RL, "demo-rl")
    assert "anchor after" in capsys.readouterr().out
    (metrics,) = (demo_directory / "jobs").glob("*/metrics.jsonl")
    assert (summary["steps"], len(metrics.read_text().splitlines())) == (15, 16)
    # The anchor, a moving average, is less noisy than the student.
    assert summary["anchor_accuracy_after"] >= summary["accuracy_before"] + 0.05
