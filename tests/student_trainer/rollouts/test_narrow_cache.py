"""The bfloat16 cache has half of the size, and keeps rollouts bit-identical."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.rollouts import sampler
from student_trainer.rollouts.narrow_cache import NarrowCache, make_cache
from student_trainer.rollouts.sampler import SampledTokens, Sampler
from tests.student_trainer import tiny


def write_tokens(model: Any) -> list[SampledTokens]:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> list[Tensor]:
        return [torch.rand(12, generator=generator, dtype=torch.float64) for _ in range(3)]

    prompts = [torch.randint(13, (length,), generator=generator) for length in (2, 5, 7)]
    writer = Sampler(model, tiny.tokenizer(), top_k=4, temperature=1.0, draws=3, bf16=True)
    return writer.write(prompts, [12, 7, 12], uniform(), None, uniform())


def test_rollouts_are_equal_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(seed=3, layers=3)
    caches: list[NarrowCache] = []

    def record_cache(model: Any, *, bf16: bool) -> NarrowCache | None:
        caches.append(make_cache(model, bf16=bf16))  # type: ignore[arg-type]
        return caches[-1]

    monkeypatch.setattr(sampler, "make_cache", record_cache)
    sequences = write_tokens(model)
    monkeypatch.setattr(sampler, "make_cache", lambda model, bf16: None)
    for sequence, expected in zip(sequences, write_tokens(model), strict=True):
        assert torch.equal(sequence.token_ids, expected.token_ids)
        assert torch.equal(sequence.token_logprobs, expected.token_logprobs)
        assert torch.equal(sequence.head_ids, expected.head_ids)
        assert sequence.draws is not None
        assert expected.draws is not None
        assert torch.equal(sequence.draws.logprobs, expected.draws.logprobs)
    (cache,) = caches
    dtypes = {(layer.keys.dtype, layer.values.dtype) for layer in cache.layers}
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}


def test_others_keep_their_own_cache() -> None:
    assert make_cache(tiny.model(), bf16=False) is None
