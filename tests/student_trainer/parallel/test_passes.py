"""Forward passes without a gradient, layer by layer, with different work in each process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clients.config.tables.common import StudentConfig
from student_trainer.data.sequence import Rollout
from student_trainer.model.student import compile_layers
from student_trainer.parallel.passes import run_passes, run_passes_over_rollouts
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import local
from tests.forks import Forks
from tests.student_trainer.parallel.divided import make
from tests.student_trainer.teachers.anchors import rollouts, spread_student

TOKENS = 12  # of a micro-batch
# Rollouts of each process: several, none, and one.
SHARES = ((0, 1, 2, 3, 4), (), (5,), (6,))


def refuse_gathering(*_: object) -> AbstractContextManager[None]:
    raise AssertionError("a pass must not gather all weights")


def score_share(student: Replicated | Sharded, share: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """Return states, log-probs, top ids and losses of each rollout."""
    student.trained.eval()
    passes = {
        "states": student.states,
        "logprobs": lambda batch: student.rows(batch, 1.3)[1].token_logprobs,
        "top": lambda batch: student.rows(batch, 1.3, 3)[0],
        "loss": lambda batch: student.forward(
            batch, lambda rows, _: -rows.token_logprobs, 1.3
        ).metrics["loss"],
    }
    return {
        f"{name}/{number}": values.contiguous()
        for name, forward_pass in passes.items()
        for number, values in enumerate(
            run_passes_over_rollouts(student, share, forward_pass, tokens_per_micro_batch=TOKENS)
        )
    }


def score_in_process(out: Path, groups: tuple[int, int], compiled: bool) -> None:
    rank = int(os.environ["RANK"])
    student = spread_student(make("qwen3"), "fsdp2", *groups)
    if student.context is None:  # type: ignore[union-attr]
        Sharded.gathered = refuse_gathering  # type: ignore[method-assign,assignment]
    student.choose_attention(StudentConfig(model="-"))
    if compiled:
        compile_layers(student.trained)
    Sharded.gathered = refuse_gathering  # type: ignore[method-assign,assignment]
    score_share(student, [rollouts()[number] for number in SHARES[rank]])
    with torch.no_grad():  # the next scores use the new weights, including embeddings and head
        for weight in student.trained.parameters():
            local(weight).mul_(1.5)
    scores = score_share(student, [rollouts()[number] for number in SHARES[rank]])
    save_file(scores | {"-": torch.zeros(1)}, out / f"{rank}.safetensors")


@pytest.mark.parametrize(
    ("world", "groups"),
    [
        pytest.param(2, (1, 1), id="two"),
        pytest.param(4, (1, 1), id="four"),
        pytest.param(4, (2, 1), id="tensor", marks=pytest.mark.slow),
        pytest.param(4, (1, 2), id="context"),
    ],
)
def test_scores_as_one_process(tmp_path: Path, world: int, groups: tuple[int, int]) -> None:
    assert (
        Forks(world, tmp_path / "group", score_in_process, tmp_path, groups, False).wait()
        == [0] * world
    )
    student = spread_student(make("qwen3"), pack=True)
    with torch.no_grad():
        for weight in student.trained.parameters():
            weight.mul_(1.5)
    for rank in range(world):
        expected = score_share(student, [rollouts()[number] for number in SHARES[rank]])
        scores = load_file(tmp_path / f"{rank}.safetensors")
        assert scores.keys() - {"-"} == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(scores[name], values, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_compiled_layers_score_eagerly(tmp_path: Path) -> None:
    assert Forks(2, tmp_path / "group", score_in_process, tmp_path, (1, 1), True).wait() == [0, 0]


def test_a_batch_is_made_when_its_turn_comes() -> None:
    """All batches of a step may exceed a device's memory."""
    calls: list[tuple[str, int]] = []

    def record_call(name: str) -> Any:
        return lambda number: calls.append((name, number)) or number

    student = spread_student(make("qwen3"))
    assert run_passes(student, [1, 2, 3], record_call("made"), record_call("scored")) == [1, 2, 3]
    assert calls == [(name, number) for number in (1, 2, 3) for name in ("made", "scored")]
