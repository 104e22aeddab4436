"""Recomputation policies keep the gradients, and recompute the documented layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clients.config.tables.common import StudentConfig
from student_trainer.model.loading import recompute_activations
from student_trainer.model.student import Student
from tests.student_trainer import tiny
from tests.student_trainer.model.test_lora import batch_of

LAYERS = 4


def run_backward(policy: Any, *, bf16: bool = False) -> tuple[dict[str, Tensor], int, list[int]]:
    """Return gradients, FLOPs of the backward pass, and calls of each layer's norm."""
    model = tiny.model(layers=LAYERS)
    recompute_activations(model, policy)
    calls = [0] * LAYERS

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            calls[number] += 1

        return hook

    batch, student = batch_of(model), Student(model.train(), bf16=bf16)
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(count(number))
    out = student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
    with FlopCounterMode(display=False) as counter:
        out.loss_sum.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, counter.get_total_flops(), calls


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("policy", [True, 2, 3, "selective"])
def test_gradients_are_those_without(policy: Any, bf16: bool) -> None:
    expected, _, _ = run_backward(False, bf16=bf16)
    gradients, _, _ = run_backward(policy, bf16=bf16)
    assert gradients.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(gradients[name], grad), name


def test_what_is_recomputed() -> None:
    plain_flops, plain_calls = run_backward(False)[1:]
    assert plain_calls == [1] * LAYERS
    full_flops, full_calls = run_backward(True)[1:]
    assert full_calls == [2] * LAYERS
    assert run_backward(2)[2] == [2, 1, 2, 1]
    assert run_backward(3)[2] == [2, 1, 1, 2]
    assert run_backward(2)[1] - plain_flops == (full_flops - plain_flops) // 2
    selective_flops, selective_calls = run_backward("selective")[1:]
    assert selective_flops == plain_flops < full_flops, "no matrix product is computed again"
    assert selective_calls == [2] * LAYERS, "and the rest is"


def test_values_of_the_key() -> None:
    for value in (True, False, 2, 7, "selective"):
        student = StudentConfig.model_validate({"model": "m", "gradient_checkpointing": value})
        assert student.gradient_checkpointing is value or student.gradient_checkpointing == value
        assert type(student.gradient_checkpointing) is type(value)
    for wrong in (1, 0, -2, 1.5, "full", "true", "2", "", None):
        with pytest.raises(ValueError, match="gradient_checkpointing"):
            StudentConfig.model_validate({"model": "m", "gradient_checkpointing": wrong})
