"""The time limit of a collective, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyTraining
from student_trainer.parallel.collectives import make_accelerator, time_limit
from tests.student_trainer import tiny

MATERIAL = tiny.Material.at(Path("/nowhere"))
# 600 s, and 32 answers of 100 tokens at 50 tokens a second; the evaluation has fewer.
SIZES: dict[str, Any] = {
    "train__prompts_per_step": 4,
    "method__rollouts_per_prompt": 8,
    "method__max_new_tokens": 100,
}


@pytest.mark.parametrize(
    ("config", "weights", "seconds"),
    [
        (tiny.job(MATERIAL, **SIZES), 0, 600 + 64 + 60),
        (tiny.job(MATERIAL, **SIZES, teacher__patience_seconds=7200.0), 0, 600 + 64 + 7200),
        (tiny.job(MATERIAL, **SIZES, train__processes=2), 0, 600 + 32 + 60),
        (tiny.job(MATERIAL, **SIZES, eval__prompts=64), 0, 600 + 128 + 60),
        (tiny.job(MATERIAL, **SIZES), 7_000_000_000, 600 + 64 + 60 + 3360),
        (tiny.rl_job(MATERIAL, **SIZES), 0, 600 + 64 + 320),
        (
            tiny.rl_job(MATERIAL, **SIZES, eval__samples=8, eval__temperature=1.0),
            0,
            600 + 128 + 640,
        ),
        (tiny.rl_job(MATERIAL, **SIZES, reward__timeout_seconds=60.0), 0, 600 + 64 + 1920),
        (tiny.rl_job(MATERIAL, **SIZES, reward=None, anchor__context="x"), 0, 600 + 64),
        (
            tiny.rl_job(
                MATERIAL,
                **SIZES,
                environment__retriever="http://r:1/",
                environment__max_passage_tokens=9,
                environment__timeout_seconds=10.0,
            ),
            0,
            600 + 64 + 320 + 160,
        ),
    ],
)
def test_it_follows_from_the_job(config: AnyTraining, weights: int, seconds: float) -> None:
    assert time_limit(config, weights).total_seconds() == seconds


def test_collectives_have_it() -> None:
    limit = time_limit(tiny.job(MATERIAL), 0)
    handler = make_accelerator(limit).init_handler
    assert handler is not None
    assert handler.timeout == limit
