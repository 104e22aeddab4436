"""Context-parallel groups learn as one process does, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from student_trainer.data.packing import Layout
from tests.forks import Forks
from tests.student_trainer.parallel.shared_tokens import (
    METHODS,
    check_students,
    learn,
    run_processes,
    student_of,
)
from tests.student_trainer.teachers.anchors import spread_student

ERROR = 1e-10
# transformers computes the softmax of eager attention in float32, even in a float64 model.
EAGER_ERROR = 1e-6
Case = tuple[str, str, Layout, str, Any, bool]
# Architecture, objective, layout, attention, recomputation, LoRA.
CASES_OF_TWO: Sequence[Case] = [
    *[("qwen3", name, "lines", "sdpa", False, False) for name in METHODS],
    ("llama", "sft", "one_line", "sdpa", "selective", False),
    ("qwen2", "offline", "padded", "sdpa", True, True),
    ("olmo2", "on_policy", "padded", "eager", 2, False),
]
# Two key heads for four processes: each head is repeated.
CASES_OF_FOUR: Sequence[Case] = [
    ("qwen3", "rl", "padded", "sdpa", True, False),
    ("llama", "on_policy", "lines", "sdpa", "selective", True),
    ("mistral", "sft", "one_line", "sdpa", False, False),
    ("gpt_neox", "offline", "lines", "sdpa", False, False),
]


@pytest.mark.parametrize(
    ("world", "size", "cases"),
    [
        (2, 2, CASES_OF_TWO),
        pytest.param(4, 4, CASES_OF_FOUR, marks=pytest.mark.slow),
        pytest.param(4, 2, CASES_OF_TWO[:1] + CASES_OF_FOUR[:2], marks=pytest.mark.slow),
    ],
    ids=["one group of two", "one group of four", "two groups of two"],
)
def test_learns_as_one_process(
    world: int, size: int, cases: Sequence[Case], tmp_path: Path
) -> None:
    """Losses, metrics, norms and weights after two updates."""
    run_processes(world, tmp_path, size, cases)
    for number, (architecture, name, layout, attention, _, lora) in enumerate(cases):
        model = student_of(architecture, attention, lora=lora)
        error = EAGER_ERROR if attention == "eager" else ERROR
        metrics, weights = learn(spread_student(model), name, range(world), layout)
        metrics_of_ranks = {}
        for rank in range(world):
            metrics_of_ranks |= load_file(tmp_path / f"{number}-{rank}-metrics.safetensors")
            stored_weights = load_file(tmp_path / f"{number}-{rank}-weights.safetensors")
            assert stored_weights.keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(
                    stored_weights[key], value, rtol=error, atol=error, msg=key
                )
        assert metrics_of_ranks.keys() == metrics.keys()
        for key, value in metrics.items():
            torch.testing.assert_close(
                metrics_of_ranks[key], value, rtol=error, atol=error, msg=key
            )


# Architecture and settings -> why its tokens cannot be divided; "" if they can.
CHECKED_STUDENTS: Sequence[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {}, ""),
    ("gemma2", {"query_pre_attn_scalar": 8}, ""),
    ("gpt2", {}, "its forward pass fails with a part of them"),
    ("lfm2", {"layer_types": ["full_attention", "conv"]}, "its Lfm2DecoderLayer does not use"),
    (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "head_dim": 16}
        | {"intermediate_size": 64},
        "its attention has s_aux, a value for each head",
    ),
]


def test_students_that_cannot_be_divided(tmp_path: Path) -> None:
    students = [(name, changes) for name, changes, _ in CHECKED_STUDENTS]
    group = Forks(2, tmp_path / "group", check_students, tmp_path, students)
    assert group.wait(240) == [0, 0]
    for number, (name, _, why) in enumerate(CHECKED_STUDENTS):
        for rank in range(2):
            verdict = (tmp_path / f"{number}-{rank}").read_text()
            assert verdict.startswith("train.context_parallel: the tokens of " if why else "")
            assert (why in verdict) if why else (verdict == ""), name
