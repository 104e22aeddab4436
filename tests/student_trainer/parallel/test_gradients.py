"""Gradients of a mesh of processes: a common norm, and equal copies in a group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from student_trainer.loop.optimizer import clip_gradients
from student_trainer.parallel.sharding import Sharded
from student_trainer.parallel.shards import full_tensor, local
from tests.forks import Forks
from tests.student_trainer.parallel.divided import make
from tests.student_trainer.teachers.anchors import spread_student

UNDIVIDED = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight")


def clip_unequal_copies(out: Path) -> None:
    """Give the copies of undivided weights a different gradient in every process, and clip."""
    student = spread_student(make("qwen3"), "fsdp2", 2)
    assert isinstance(student, Sharded)
    weights = dict(student.trained.model.named_parameters())
    rank = int(os.environ["RANK"])
    gradients = {name: torch.ones_like(weight) for name, weight in weights.items()}
    for name in UNDIVIDED:
        local(gradients[name]).fill_(3 if rank % 2 else 1)
    for name, weight in weights.items():
        weight.grad = gradients[name]
    norm = clip_gradients(student, 1e9)
    full_gradients = {name: full_tensor(gradient) for name, gradient in gradients.items()}
    save_file(full_gradients | {"norm": norm}, out / f"{rank}.safetensors")


def test_copies_in_a_group_get_one_gradient(tmp_path: Path) -> None:
    assert Forks(4, tmp_path / "group", clip_unequal_copies, tmp_path).wait() == [0] * 4
    weights = dict(make("qwen3").named_parameters())
    undivided_elements = sum(weights[name].numel() for name in UNDIVIDED)
    total = sum(weight.numel() for weight in weights.values())
    for rank in range(4):
        gradients = load_file(tmp_path / f"{rank}.safetensors")
        assert float(gradients.pop("norm")) == pytest.approx(
            (total + 3 * undivided_elements) ** 0.5
        )
        assert gradients.keys() == weights.keys()
        for name, gradient in gradients.items():
            assert (gradient == (2 if name in UNDIVIDED else 1)).all(), name
