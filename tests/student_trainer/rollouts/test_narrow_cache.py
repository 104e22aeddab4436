"""The cache in bfloat16 holds half of the bytes, and changes no bit of a rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.rollouts import sampler
from student_trainer.rollouts.narrow_cache import NarrowCache, make_cache
from student_trainer.rollouts.sampler import SampledTokens, Sampler
from tests.student_trainer import tiny


def sampled(model: Any) -> list[SampledTokens]:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> list[Tensor]:
        return [torch.rand(12, generator=generator, dtype=torch.float64) for _ in range(3)]

    before = [torch.randint(13, (length,), generator=generator) for length in (2, 5, 7)]
    writer = Sampler(model, tiny.tokenizer(), top_k=4, temperature=1.0, draws=3, bf16=True)
    return writer.write(before, [12, 7, 12], uniform(), None, uniform())


def test_rollouts_are_equal_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(seed=3, layers=3)
    caches: list[NarrowCache] = []

    def noted(model: Any, *, bf16: bool) -> NarrowCache | None:
        caches.append(make_cache(model, bf16=bf16))  # type: ignore[arg-type]
        return caches[-1]

    monkeypatch.setattr(sampler, "make_cache", noted)
    found = sampled(model)
    monkeypatch.setattr(sampler, "make_cache", lambda model, bf16: None)
    for ours, theirs in zip(found, sampled(model), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.token_logprobs, theirs.token_logprobs)
        assert torch.equal(ours.head_ids, theirs.head_ids)
        assert ours.draws is not None
        assert theirs.draws is not None
        assert torch.equal(ours.draws.logprobs, theirs.draws.logprobs)
    (cache,) = caches
    held = {(layer.keys.dtype, layer.values.dtype) for layer in cache.layers}
    assert held == {(torch.bfloat16, torch.bfloat16)}


def test_others_keep_their_own_cache() -> None:
    assert make_cache(tiny.model(), bf16=False) is None
