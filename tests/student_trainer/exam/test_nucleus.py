"""The nucleus of top-p sampling, compared with that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

from student_trainer.rollouts.sample_step import nucleus
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from tests.student_trainer import tiny


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_nucleus(top_p: float) -> None:
    logits = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0)).double()
    probabilities = nucleus(logits.softmax(1), top_p)
    warped_logits = TopPLogitsWarper(top_p)(torch.zeros(64, 1, dtype=torch.long), logits)
    torch.testing.assert_close(
        probabilities / probabilities.sum(1, keepdim=True), warped_logits.softmax(1)
    )


def test_what_is_drawn_is_of_the_nucleus() -> None:
    model, words = tiny.model(seed=1, layers=2, spread=0.07), tiny.tokenizer()
    prompt = torch.tensor(words("12+34=")["input_ids"])
    with torch.no_grad():
        expected = nucleus(model(prompt[None]).logits[:, -1].double().softmax(1), 0.7)[0]
    expected = expected / expected.sum()
    sampler = Sampler(model, words, top_k=0, temperature=1.0, top_p=0.7)
    count = 2000
    rollouts = sampler.write(
        [prompt] * count, [1] * count, [rollout_noise(n, 0, 1) for n in range(count)]
    )
    counts = torch.bincount(
        torch.cat([rollout.token_ids for rollout in rollouts]), minlength=len(expected)
    )
    assert not counts[expected == 0].any()
    error = (expected * (1 - expected) / count).sqrt()
    assert ((counts / count - expected).abs() <= 4.5 * error + 1e-12).all()
