"""Real questions, a real BPE vocabulary, the shipped job file: the KL to the teacher halves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clients.run_directory import RunDirectory
from tests.end_to_end.processes import ENVIRONMENT, metrics_of
from tests.teacher.processes import TeacherProcess

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
JOB = ROOT / "deploy" / "jobs" / "gsm8k_on_policy.toml"
TEXT = ["--data", str(QUESTIONS), "--columns", "question", "answer", "--separator", "\n"]
SIZE = ["--layers", "2", "--width", "64", "--batch", "8", "--max-tokens", "128"]


def run_module(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not QUESTIONS.is_file(), reason="needs GSM8K beside the checkout (../shared)")
def test_distil_on_real_questions(tmp_path: Path) -> None:
    teacher, student = str(tmp_path / "teacher"), str(tmp_path / "student")
    pretrain = ["student_trainer.pretrain", *TEXT, *SIZE]
    made = run_module(
        *pretrain, "--out", teacher, "--tokenizer", "bpe", "--vocab-size", "4096", "--steps", "150"
    )
    assert '"vocabulary": 4096' in made
    run_module(*pretrain, "--out", student, "--tokenizer", teacher, "--steps", "10")

    process = TeacherProcess(["--model", teacher, "--no-cache"], log=tmp_path / "teacher.log")
    try:
        changes = {
            "data.path": QUESTIONS,
            "student.model": student,
            "teacher.address": process.address,
            "max_steps": 90,
            "method.max_new_tokens": 32,
            "train.prompts_per_step": 8,
            "train.learning_rate": "5e-3",
            "eval.prompts": 32,
            "eval.every": 30,
        }
        overrides = [f"--set={key}={value}" for key, value in changes.items()]
        run_module("clients", "run", str(JOB), "--runs", str(tmp_path / "runs"), *overrides)
    finally:
        process.close()
    (path,) = (tmp_path / "runs").iterdir()
    evaluations = [line["eval/kl"] for line in metrics_of(RunDirectory(path)) if "eval/kl" in line]
    print(f"held-out KL to the teacher: {evaluations}")
    assert evaluations[-1] <= evaluations[0] / 2
