"""PPO's ratio compares the student with its own old log-probs, not with those of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from student_trainer.data.sequence import Rollout
from student_trainer.loop.trainer import Trainer
from student_trainer.methods.rl import PendingRLSequence
from student_trainer.tools.pretrain import make_model
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.test_rl import HOT, trainer_of


def use_sampler_logprobs(item: PendingRLSequence) -> PendingRLSequence:
    """Return the item with the sampler's log-probs in place of the student's old log-probs."""
    sequence = cast(Rollout, item.sequence)
    return replace(item, old_logprobs=sequence.token_logprobs)


def add_rounding(item: PendingRLSequence) -> PendingRLSequence:
    """Return the item with the rounding errors of a sampler with other arithmetic.

    0.025 is the standard deviation between a bfloat16 sampler and trainer with equal weights.
    """
    sequence = cast(Rollout, item.sequence)
    generator = torch.Generator().manual_seed(len(sequence.token_ids))
    noise = 0.025 * torch.randn(sequence.token_logprobs.shape, generator=generator)
    noisy_rollout = replace(sequence, token_logprobs=sequence.token_logprobs + noise)
    return replace(item, sequence=noisy_rollout)


def clipped_share(trainer: Trainer, items: Sequence[PendingRLSequence]) -> float:
    """Return the share of tokens whose ratio is outside the clip range, for any advantage."""
    share = 0.0
    for advantage in (-1.0, 1.0):
        means = add_gradients(
            trainer, [replace(item, advantage=torch.tensor(advantage)) for item in items]
        )
        assert means["ratio/kl"] > 0
        share += means["ratio/clipped"]
    return share


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_identical_weights_in_bfloat16_clip_nothing(
    updates: int, material: tiny.Material, tmp_path: Path
) -> None:
    """GSPO with its published clips; in every update the weights are those that sampled."""
    torch.manual_seed(0)
    words = tiny.tokenizer()
    deep = make_model(len(words), words, 4, 64)
    deep.config.tie_word_embeddings = False
    deep.lm_head.weight = torch.nn.Parameter(torch.randn(deep.lm_head.weight.shape) / 4)
    config = tiny.rl_job(
        material,
        student__model=str(tiny.save(deep, words, tmp_path / "student")),
        student__dtype="bfloat16",
        method__ratio="sequence",
        method__clip_low=3e-4,
        method__clip_high=4e-4,
        method__updates_per_step=updates,
        method__temperature=1.0,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        for number, update in enumerate(trainer.method.steps(1).updates):
            items = [add_rounding(cast(PendingRLSequence, item)) for item in update]
            assert all((item.old_logprobs is None) == (number == 0) for item in items)
            sampler_items = [use_sampler_logprobs(item) for item in items]
            assert clipped_share(trainer, items) == 0
            assert clipped_share(trainer, sampler_items) > 0.5
            trainer.optimizer.zero_grad()


def test_the_log_probs_are_those_before_the_step(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(material, method__updates_per_step=2, method__temperature=HOT)
    with trainer_of(tmp_path / "run", config) as trainer:
        _, second = trainer.method.steps(1).updates
        for item in second:
            old_logprobs = cast(PendingRLSequence, item).old_logprobs
            assert old_logprobs is not None
            assert old_logprobs.dtype == torch.float32
            # In float32 the sampler has equal log-probs.
            sampler_logprobs = cast(Rollout, item.sequence).token_logprobs
            assert (old_logprobs - sampler_logprobs).abs().max() < 1e-5
