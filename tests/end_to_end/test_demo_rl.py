"""A small `distill demo-rl` with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.cli.demos import demo_rl
from protos.errors import ExitCode
from tests.student_trainer import tiny

# An untrained student learns to write one character in seconds; addition would take minutes.
CHANGES = {
    "reward.type": "regex",
    "reward.pattern": "1",
    "method.temperature": "4.0",
    "train.learning_rate": "0.01",
    "train.prompts_per_step": "8",
    "eval.prompts": "16",
    "eval.every": "20",
    "max_steps": "20",
}


@pytest.mark.slow
def test_it_learns_what_is_rewarded(
    material: tiny.Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The student already exists, so the test skips the minute of pretraining.
    monkeypatch.setattr(demo_rl, "MAKE_STUDENT", demo_rl.MAKE_DATA)
    changes = {**CHANGES, "student.model": str(material.student)}
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    demo_directory = tmp_path / "demo"
    assert main(["demo-rl", "--runs", str(demo_directory), *options]) == ExitCode.OK
    assert "anchor after" in capsys.readouterr().out
    (metrics,) = (demo_directory / "jobs").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    summary = json.loads((demo_directory / "summary.json").read_text())
    assert (summary["steps"], len(lines)) == (20, 21)
    # The reward on held-out prompts.
    assert lines[-1]["eval/reward"] >= lines[0]["eval/reward"] + 0.15
