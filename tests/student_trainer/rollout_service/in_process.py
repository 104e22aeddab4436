"""What the trainer's own process samples for an order: the oracle of the services."""

from __future__ import annotations

from typing import Any

import numpy as np

from student_trainer.data.prompts import Prompt
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.rollouts.sampler import SampledTokens
from tests.student_trainer import tiny


def in_process(wanted: Order, model: Any, *, bf16: bool = False) -> list[SampledTokens]:
    """The sequences of an order whose limits are equal, by `HuggingFaceRollouts`."""
    settings = wanted.settings
    rollouts = HuggingFaceRollouts(
        model,
        tiny.tokenizer(),
        top_k=settings.top_k,
        temperature=settings.temperature,
        max_new_tokens=wanted.sequences[0].limit,
        batch_tokens=settings.batch_tokens,
        draws=settings.draws,
        bf16=bf16,
    )
    prompts = [Prompt(one.token_ids.numpy().astype(np.int32), "") for one in wanted.sequences]
    numbers = [one.number for one in wanted.sequences]
    greedy = settings.seed is None
    found = rollouts.generate(prompts, numbers, seed=settings.seed or 0, greedy=greedy)
    return [
        SampledTokens(
            one.token_ids[one.start :],
            one.head_ids,
            one.token_logprobs,
            not one.truncated,
            False,
            one.draws,
        )
        for batch in found
        for one in batch
    ]
