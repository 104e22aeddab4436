"""Sequences in a checkpoint come back as they were, from one process or several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from student_trainer.data.rollout import TailDraws
from student_trainer.rollout_client.stored_sequences import encoded, file_name, read
from student_trainer.rollouts.sampler import SampledTokens

K, M = 3, 2


def sequence(length: int, *, draws: bool, seed: int) -> SampledTokens:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (length, 1 + K + M), generator=numbers)
    logprobs = torch.randn(length, 1 + M, generator=numbers)
    return SampledTokens(
        ids[:, 0],
        ids[:, 1 : 1 + K],
        logprobs[:, 0],
        bool(seed % 2),
        bool(seed % 3),
        TailDraws(ids[:, 1 + K :].int(), logprobs[:, 1:]) if draws else None,
        ((seed, length - 1), (seed + 1, 1)) if length > 1 else (),
    )


@pytest.mark.parametrize("draws", [False, True])
def test_round_trip(draws: bool, tmp_path: Path) -> None:
    stored = {7 * n - 3: sequence(1 + 5 * n, draws=draws, seed=n) for n in range(6)}
    halves = [dict(list(stored.items())[:2]), dict(list(stored.items())[2:])]
    for part, half in enumerate(halves):
        (tmp_path / file_name(part)).write_bytes(encoded(half))
    found = read(tmp_path)
    assert found.keys() == stored.keys()
    for number, one in stored.items():
        same(found[number], one)


def same(found: SampledTokens, expected: SampledTokens) -> None:
    for name in ("token_ids", "head_ids", "token_logprobs"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
    assert (found.draws is None) == (expected.draws is None)
    if found.draws is not None and expected.draws is not None:
        assert torch.equal(found.draws.ids, expected.draws.ids)
        assert torch.equal(found.draws.logprobs, expected.draws.logprobs)
    plain = {"token_ids": None, "head_ids": None, "token_logprobs": None, "draws": None}
    assert replace(found, **plain) == replace(expected, **plain)


def test_a_checkpoint_without_rollouts(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
