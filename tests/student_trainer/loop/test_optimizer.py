"""The optimizer of a job, and its state in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clients.config.tables.common import TrainConfig
from student_trainer.checkpoints import checkpoint
from student_trainer.loop.optimizer import make_optimizer
from tests.student_trainer import tiny
from tests.student_trainer.saving import save_checkpoint


def step_once(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter)
    optimizer.step()


def save_after_an_update(root: Path, model: Any, optimizer: torch.optim.Optimizer) -> Path:
    step_once(model, optimizer, 0)
    words = tiny.tokenizer()
    return save_checkpoint(root, 1, model=model, tokenizer=words, optimizer=optimizer)


def test_the_fused_kernel_updates_as_adamw_in_float64() -> None:
    settings = TrainConfig(learning_rate=1e-2, weight_decay=0.1, adam_betas=(0.8, 0.9))
    model, exact_model = tiny.model(seed=3), tiny.model(seed=3).double()
    optimizer = make_optimizer(settings, model)
    reference = torch.optim.AdamW(
        exact_model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, foreach=False
    )
    for seed in range(3):
        step_once(model, optimizer, seed)
        step_once(exact_model, reference, seed)
    for parameter, exact_parameter in zip(
        model.parameters(), exact_model.parameters(), strict=True
    ):
        assert torch.allclose(parameter.double(), exact_parameter, rtol=1e-6, atol=1e-7)


def test_the_fused_kernel_updates_the_weights_that_learn() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(TrainConfig(), model)
    (group,) = optimizer.param_groups
    assert group["fused"]
    assert [id(parameter) for parameter in group["params"]] == [
        id(parameter) for parameter in model[1].parameters()
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_the_count_of_steps_is_loaded_where_the_kernel_reads_it(
    tmp_path: Path, fused: bool
) -> None:
    """The fused kernel reads it on the weight's device, here the meta device."""
    model = tiny.model(seed=3)
    path = save_after_an_update(tmp_path, model, torch.optim.AdamW(model.parameters()))
    resumed = torch.optim.AdamW(model.parameters(), fused=fused)
    model.to("meta")
    checkpoint.load_optimizer(path, model, resumed)
    assert resumed.state
    for state in resumed.state.values():
        assert state["step"].device.type == ("meta" if fused else "cpu")
        assert state["exp_avg"].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_resumes_bit_by_bit(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    settings = TrainConfig(learning_rate=1e-2)
    model, resumed_model = tiny.model(seed=3).to(cuda), tiny.model(seed=3).to(cuda)
    optimizer = make_optimizer(settings, model)
    path = save_after_an_update(tmp_path, model, optimizer)
    resumed = make_optimizer(settings, resumed_model)
    resumed_model.load_state_dict(model.state_dict())
    checkpoint.load_optimizer(path, resumed_model, resumed)
    step_once(model, optimizer, 1)
    step_once(resumed_model, resumed, 1)
    for parameter, resumed_parameter in zip(
        model.parameters(), resumed_model.parameters(), strict=True
    ):
        assert torch.equal(parameter, resumed_parameter)
