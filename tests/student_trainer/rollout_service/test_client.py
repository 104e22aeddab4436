"""The client with real services: bits, restarts, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from student_trainer.data.prompts import Prompt
from student_trainer.rollouts.engine_client import EngineClient
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.rollouts.order import Order
from student_trainer.rollouts.sampler import SampledTokens
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.material import (
    DRAWS,
    TOP_K,
    assert_same,
    order,
    snapshot,
    student,
)


def in_process(wanted: Order, model: object, *, bf16: bool = False) -> list[SampledTokens]:
    """What the trainer's own process samples for the prompts of an order."""
    settings = wanted.settings
    rollouts = HuggingFaceRollouts(
        model,
        tiny.tokenizer(),
        top_k=TOP_K,
        temperature=settings.temperature,
        max_new_tokens=wanted.sequences[0].limit,
        batch_tokens=settings.batch_tokens,
        draws=DRAWS,
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


def collected(client: EngineClient, wanted: Order) -> list[SampledTokens]:
    """The sequences of an order, each exactly once, in the order's order."""
    found: dict[int, SampledTokens] = {}
    for index, sampled in client.sample(wanted):
        assert index not in found
        found[index] = sampled
    assert sorted(found) == list(range(len(wanted.sequences)))
    return [found[index] for index in sorted(found)]


def test_a_service_samples_the_bits_of_the_trainers_process(
    start_service: StartService, tmp_path: Path
) -> None:
    service = start_service("--dtype", "float32")
    with EngineClient([service.address]) as client:
        assert client.info(len(tiny.tokenizer())).engine == "hf"
        for number in (1, 2):
            wanted = order(snapshot(tmp_path, number), number=number)
            found = collected(client, wanted)
            for one, own in zip(found, in_process(wanted, student(number)), strict=True):
                assert_same(one, own)
                assert one.versions == ((number, len(one.token_ids)),)
