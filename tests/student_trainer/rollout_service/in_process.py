"""Sampling of orders in the trainer's process, the reference for the services."""

from __future__ import annotations

from typing import Any

import numpy as np

from student_trainer.data.prompts import Prompt
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import SampledTokens, Sampler
from tests.student_trainer import tiny


def sample_in_process(order: Order, model: Any, *, bf16: bool = False) -> list[SampledTokens]:
    """Sample an order, whose limits must be equal, with `HuggingFaceRollouts`."""
    settings = order.settings
    rollouts = HuggingFaceRollouts(
        Sampler(
            model,
            tiny.tokenizer(),
            top_k=settings.top_k,
            temperature=settings.temperature,
            draws=settings.draws,
            bf16=bf16,
        ),
        max_new_tokens=order.sequences[0].limit,
        batch_tokens=settings.batch_tokens,
    )
    prompts = [
        Prompt(request.token_ids.numpy().astype(np.int32), "") for request in order.sequences
    ]
    numbers = [request.number for request in order.sequences]
    greedy = settings.seed is None
    batches = rollouts.generate(prompts, numbers, seed=settings.seed or 0, greedy=greedy)
    return [
        SampledTokens(
            rollout.token_ids[rollout.start :],
            rollout.head_ids,
            rollout.token_logprobs,
            not rollout.truncated,
            False,
            rollout.draws,
        )
        for batch in batches
        for rollout in batch
    ]
