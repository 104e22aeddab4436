"""A job whose rollouts vLLM samples, beside one whose rollouts transformers samples."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients.runs.directory import RunDirectory
from tests.end_to_end.processes import metrics_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


def finished(path: Path, config: Any) -> list[dict[str, Any]]:
    """The metrics of a whole attempt, by the trainer's own command."""
    run = RunDirectory.create(path, config)
    process = subprocess.run(
        [sys.executable, "-m", "student_trainer", str(path), "--attempt", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return metrics_of(run)


def test_reinforcement_with_an_anchor(tmp_path: Path) -> None:
    """Training, evaluation and the anchor's evaluation are sampled; weights come in every step."""
    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    material = tiny.save_material(tmp_path / "material")
    words = tiny.tokenizer()
    tiny.save(make_model(len(words), words, 2, 64), words, material.student)  # heads of 32
    changes: dict[str, Any] = {"max_steps": 6, "eval__every": 3, "rollouts__lag": 1}
    expected = finished(tmp_path / "hf", tiny.rl_job(material, **changes))
    metrics = finished(tmp_path / "vllm", tiny.rl_job(material, **changes, rollouts__engine="vllm"))
    assert [line.get("rollout/lag") for line in metrics] == [None, 0, 1, 1, 1, 1, 1]
    assert metrics[0]["eval/accuracy"] == expected[0]["eval/accuracy"]
    # Rounding may decide a token where a random number lies on a boundary: about one in 10,000.
    for vllm_values, hf_values in zip(metrics[1:4], expected[1:4], strict=True):
        for name in ("reward/mean", "kl/anchor", "ratio/mean", "entropy"):
            assert vllm_values[name] == pytest.approx(hf_values[name], abs=0.02), (
                vllm_values["step"],
                name,
            )
    assert all(abs(line["ratio/kl"]) < 0.05 for line in metrics[1:])
    assert "eval/anchor/reward" in metrics[-1]
