"""RL without rewards has the same bits as on-policy distillation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from student_trainer.assembly import assemble
from student_trainer.rewards import Rewards, make_rewards
from student_trainer.teachers.connections import connect
from tests.end_to_end.processes import metrics_of
from tests.student_trainer import tiny

STEPS = 6


def open_rewards(config: OnPolicyJob | RLJob) -> AbstractContextManager[Rewards | None]:
    if isinstance(config, OnPolicyJob) or config.reward is None:
        return nullcontext()
    return make_rewards(config.reward)


def train_run(path: Path, config: OnPolicyJob | RLJob) -> RunDirectory:
    """Train in this process, with a teacher service in another one."""
    run = RunDirectory.create(path, config)
    progress = Progress(run, attempt=1, max_steps=STEPS, main=True, terminated=lambda: False)
    with open_rewards(config) as rewards, connect(config) as teachers:
        assembled_job = assemble(config, run, teachers, progress, 1, None, rewards)
        assert assembled_job.train() == "succeeded"
    return run


def select_metrics(metrics: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name in names}


def test_without_rewards_it_is_on_policy_distillation(
    material: tiny.Material, teacher: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "max_steps": STEPS,
        "eval__every": 3,
        "method__rollouts_per_prompt": 2,
        "method__temperature": 2.0,
    }
    on_policy_run = train_run(tmp_path / "plain", tiny.job(material, teacher, **changes))
    rl_config = tiny.rl_job(
        material,
        teacher={"address": teacher},
        method__reward_weight=0.0,
        method__beta=0.0,
        method__updates_per_step=1,
        **changes,
    )
    assert rl_config.method.teacher_beta == 1
    rl_run = train_run(tmp_path / "rl", rl_config)
    curves = [tiny.curve(metrics_of(run)) for run in (on_policy_run, rl_run)]
    for line in curves[1]:  # in RL, the name of the metric contains the kind of KL
        if "topk/teacher_gradient_sd" in line:
            line["topk/gradient_sd"] = line["topk/teacher_gradient_sd"]
    names = set(curves[0][-1])
    assert {"loss", "kl/teacher", "eval/kl", "eval/accuracy", "grad_norm", "entropy"} <= names
    assert [select_metrics(line, names) for line in curves[1]] == curves[0]
    assert "reward/mean" in curves[1][-1], "rewards are measured all the same"
    weights = [load_file(run.export / "model.safetensors") for run in (on_policy_run, rl_run)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_teacher_and_anchor_at_once(material: tiny.Material, teacher: str, tmp_path: Path) -> None:
    """With forward KL, the anchor is evaluated at the ids that the teacher chose."""
    for divergence in ("reverse_kl", "forward_kl"):
        config = tiny.rl_job(
            material,
            teacher={"address": teacher},
            max_steps=2,
            method__divergence=divergence,
        )
        run = train_run(tmp_path / divergence, config)
        last_line = metrics_of(run)[-1]
        assert {"kl/teacher", "kl/anchor", "eval/kl", "eval/anchor/kl", "reward/mean"} <= set(
            last_line
        )
        assert last_line["kl/teacher"] > abs(last_line["kl/anchor"]) > 0
        lines = (run.samples / "step-000002.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert samples
        assert all("reward" in sample for sample in samples)
