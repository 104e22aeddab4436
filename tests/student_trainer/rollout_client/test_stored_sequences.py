"""Rollouts in a checkpoint are restored unchanged, from one process or several."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.rollout_client.stored_sequences import (
    encode_rollouts,
    file_name,
    read_rollouts,
)

K, M = 3, 2


def make_rollout(length: int, *, draws: bool, talks: bool, seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (length, 1 + K + M), generator=generator)
    logprobs = torch.randn(length, 1 + M, generator=generator)
    start = 1 + seed
    return Rollout(
        token_ids=torch.cat([torch.arange(start), ids[:, 0]]),
        start=start,
        head_ids=ids[:, 1 : 1 + K].int(),
        token_logprobs=logprobs[:, 0],
        truncated=bool(seed % 2),
        answer="",
        own=torch.rand(length, generator=generator) < 0.5 if talks else None,
        draws=TailDraws(ids[:, 1 + K :].int(), logprobs[:, 1:]) if draws else None,
        concluded=[None, "", "zw\u00f6lf \n"][seed % 3] if talks else None,
        queries=seed if talks else 0,
        failed=talks and seed % 4 == 1,
        versions=((seed, length - 1), (seed + 1, 1)) if length > 1 else (),
    )


@pytest.mark.parametrize("talks", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_round_trip(draws: bool, talks: bool, tmp_path: Path) -> None:
    stored = {
        7 * n - 3: make_rollout(1 + 5 * n, draws=draws, talks=talks, seed=n) for n in range(6)
    }
    halves = [dict(list(stored.items())[:2]), dict(list(stored.items())[2:])]
    for part, half in enumerate(halves):
        (tmp_path / file_name(part)).write_bytes(encode_rollouts(half))
    loaded = read_rollouts(tmp_path)
    assert loaded.keys() == stored.keys()
    for number, expected in stored.items():
        for field in fields(Rollout):
            assert_same(getattr(loaded[number], field.name), getattr(expected, field.name))


def assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, TailDraws):
        assert isinstance(actual, TailDraws)
        assert_same(actual.ids, expected.ids)
        assert_same(actual.logprobs, expected.logprobs)
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def test_a_checkpoint_without_rollouts(tmp_path: Path) -> None:
    assert read_rollouts(tmp_path) == {}
