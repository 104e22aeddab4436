"""Tensor-parallel students learn as in one process, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput
from student_trainer.parallel.tensor_parallel import check_divisible, parallel_styles
from tests.student_trainer.parallel.divided import STUDENTS, UPDATES, learn, make, run_processes
from tests.student_trainer.teachers.anchors import spread_student

# transformers' norms and softmax use float32, where the order of sums matters; without them, the
# errors are 1e-13.
ERROR = 1e-6
CASES = [
    pytest.param(4, 2, False, tuple(STUDENTS), marks=pytest.mark.slow),
    (2, 2, "selective", ("qwen3", "llama")),
    pytest.param(6, 2, True, ("qwen3", "llama"), marks=pytest.mark.slow),
]


def assert_learned_as_one(out: Path, name: str, processes: int) -> None:
    """Compare norms, weights and the anchor's gap of every process with those of one process."""
    norms, expected, gap = learn(spread_student(make(name)), 0, 1)
    for rank in range(processes):
        stored_weights = load_file(out / f"{name}-{rank}.safetensors")
        numbers = stored_weights.pop("numbers").tolist()
        assert numbers[: UPDATES + 1] == pytest.approx([*norms, gap], rel=ERROR)
        assert stored_weights.keys() == expected.keys()
        for weight, value in expected.items():
            torch.testing.assert_close(
                stored_weights[weight], value, rtol=0, atol=ERROR, msg=weight
            )


def assert_held_in_shares(out: Path, name: str, processes: int, size: int) -> None:
    """Check that weights of linear modules are stored once, and others in each process of a group.

    A bias that is added after the sum over the group counts as one of the others.
    """
    model = make(name)
    styles = parallel_styles(model)
    divided = sum(
        weight.numel()
        for module in styles
        if isinstance(module, nn.Linear)
        for kind, weight in module.named_parameters()
        if kind == "weight" or "Colwise" in str(styles[module])
    )
    held_elements = [
        load_file(out / f"{name}-{rank}.safetensors")["numbers"][-1].item()
        for rank in range(processes)
    ]
    assert sum(held_elements) == divided + size * (model.num_parameters() - divided)
    assert divided > 0.9 * model.num_parameters()
    assert max(held_elements) < 1.1 * model.num_parameters() / processes


@pytest.mark.parametrize(("processes", "size", "policy", "names"), CASES)
def test_learns_as_one_process(
    processes: int, size: int, policy: bool | str, names: tuple[str, ...], tmp_path: Path
) -> None:
    run_processes(processes, size, tmp_path, names, policy)
    for name in names:
        assert_learned_as_one(tmp_path, name, processes)
        assert_held_in_shares(tmp_path, name, processes, size)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("gpt2", {}, "GPT2LMHeadModel cannot be divided over processes: transformers has no plan"),
        (
            "olmo2",
            {},
            r"Olmo2.*: model\.layers\.\*\.self_attn\.q_proj is 'colwise_gather_output' in its plan",
        ),
        (
            "qwen3_moe",
            {"num_experts": 4},
            r"Qwen3Moe.*mlp\.experts is 'moe_tp_experts' in its plan",
        ),
    ],
)
def test_models_that_cannot_be_divided(name: str, changes: dict[str, int], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        parallel_styles(make(name, changes))
    assert caught.value.field == "train.tensor_parallel"


def test_numbers_that_a_group_cannot_share(tmp_path: Path) -> None:
    make("qwen3").config.save_pretrained(tmp_path)
    student = StudentConfig(model=str(tmp_path))
    check_divisible(student, 2)
    with pytest.raises(
        InvalidInput, match="4 processes cannot share the 2 heads of keys"
    ) as caught:
        check_divisible(student, 4)
    assert caught.value.hint == "lower the value to 2"
