"""On-policy distillation is learning from rewards without any: the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

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


def rewards_of(config: OnPolicyJob | RLJob) -> AbstractContextManager[Rewards | None]:
    if isinstance(config, OnPolicyJob) or config.reward is None:
        return nullcontext()
    return make_rewards(config.reward)


def trained(path: Path, config: OnPolicyJob | RLJob) -> RunDirectory:
    """By a teacher service, in a process of its own."""
    run = RunDirectory.create(path, config)
    progress = Progress(run, attempt=1, max_steps=STEPS, main=True, terminated=lambda: False)
    with rewards_of(config) as rewards, connect(config) as teachers:
        made = assemble(config, run, teachers, None, progress, 1, None, rewards)
        assert made.train() == "succeeded"
    return run


def shared(found: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in names}


def test_without_rewards_it_is_on_policy_distillation(
    material: tiny.Material, teacher: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "max_steps": STEPS,
        "eval__every": 3,
        "method__rollouts_per_prompt": 2,
        "method__temperature": 2.0,
    }
    plain = trained(tmp_path / "plain", tiny.job(material, teacher, **changes))
    rewarded = tiny.rl_job(
        material,
        teacher={"address": teacher},
        method__reward_weight=0.0,
        method__beta=0.0,
        method__updates_per_step=1,
        **changes,
    )
    assert rewarded.method.teacher_beta == 1
    also = trained(tmp_path / "rl", rewarded)
    curves = [tiny.curve(metrics_of(run)) for run in (plain, also)]
    for line in curves[1]:  # RL names the noise after the KL that it is of
        if "topk/teacher_gradient_sd" in line:
            line["topk/gradient_sd"] = line["topk/teacher_gradient_sd"]
    names = set(curves[0][-1])
    assert {"loss", "kl/teacher", "eval/kl", "eval/accuracy", "grad_norm", "entropy"} <= names
    assert [shared(line, names) for line in curves[1]] == curves[0]
    assert "reward/mean" in curves[1][-1], "rewards are measured all the same"
    weights = [load_file(run.export / "model.safetensors") for run in (plain, also)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_teacher_and_anchor_at_once(material: tiny.Material, teacher: str, tmp_path: Path) -> None:
    """Both directions: forward, the anchor is asked at the ids that the teacher chose."""
    for divergence in ("reverse_kl", "forward_kl"):
        config = tiny.rl_job(
            material,
            teacher={"address": teacher},
            max_steps=2,
            method__divergence=divergence,
        )
        run = trained(tmp_path / divergence, config)
        last = metrics_of(run)[-1]
        assert {"kl/teacher", "kl/anchor", "eval/kl", "eval/anchor/kl", "reward/mean"} <= set(last)
        assert last["kl/teacher"] > abs(last["kl/anchor"]) > 0
        lines = (run.samples / "step-000002.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        assert told
        assert all("reward" in one for one in told)
