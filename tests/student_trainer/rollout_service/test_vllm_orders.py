"""The worker side of the vllm engine, without vLLM, with batches that change in each step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from protos.errors import Corrupt
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_service.engines.vllm_orders import WorkerOrders
from student_trainer.rollout_service.engines.vllm_running import (
    EndedSequence,
    RunningOrder,
    closed_length,
)
from student_trainer.rollout_service.engines.vllm_wire import decode_records, request_fields
from student_trainer.rollouts.sample_step import sample_step
from student_trainer.rollouts.sampler import Marks, SampledTokens, rollout_noise
from tests.student_trainer import tiny

VOCAB = 40
SETTINGS = SamplingSettings(
    top_k=3, temperature=0.7, draws=2, seed=11, stream_tokens=30, batch_tokens=100
)
VERSION = WeightsVersion("lineage", 4, Path("nowhere"))


def order_of(settings: SamplingSettings, numbers: list[int], limit: int, used: int = 0) -> Order:
    ids = torch.tensor([1, 2])
    return Order(VERSION, settings, [SequenceRequest(ids, n, limit, used) for n in numbers])


class Batches:
    """Scheduler steps of `orders` as in vLLM, with logits that depend on request and position."""

    def __init__(self, **orders: Order) -> None:
        self.worker = WorkerOrders()
        self.fields: dict[str, Mapping[str, Any] | None] = {"probe": None}
        for name, order in orders.items():
            for index in range(len(order.sequences)):
                self.fields[f"{name}-{index}"] = request_fields(name, order, index)

    def step(self, *rows: tuple[str, int], due: list[bool] | None = None) -> Tensor:
        """Sample one step for rows of (request, position)."""
        return self.worker.sample(
            torch.cat([logits_at(name, position) for name, position in rows]),
            [name for name, _ in rows],
            self.fields.__getitem__,
            np.array([position for _, position in rows]),
            np.array([True] * len(rows) if due is None else due),
        )

    def take_tokens(self, order: Order, name: str, index: int, length: int) -> SampledTokens:
        (data,) = self.worker.take(name, [(index, length)])
        draws = order.settings.draws if order.settings.seed is not None else 0
        return decode_records(
            data, top_k=order.settings.top_k, draws=draws, ended=False, closed=False
        )


def logits_at(name: str, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + position)
    return 3 * torch.randn(1, VOCAB, generator=generator)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-4:], "big")


def expected_tokens(order: Order, name: str, index: int, length: int) -> SampledTokens:
    """Return the tokens of a sequence, sampled one at a time."""
    settings, sequence = order.settings, order.sequences[index]
    steps = []
    for step_number in range(length):
        uniforms = draw_uniforms = None
        if settings.seed is not None:
            offset = sequence.used + step_number
            stream = rollout_noise(sequence.number, settings.seed, settings.stream_tokens)
            uniforms = stream[offset : offset + 1]
            if settings.draws:
                stream = rollout_noise(
                    sequence.number, settings.seed, settings.stream_tokens, draws=True
                )
                draw_uniforms = stream[offset : offset + 1]
        steps.append(
            sample_step(
                logits_at(f"{name}-{index}", step_number)[:, : settings.vocab_size],
                top_k=settings.top_k,
                temperature=settings.temperature,
                uniforms=uniforms,
                draws=settings.draws,
                draw_uniforms=draw_uniforms,
            )
        )
    draws = [step.draws for step in steps if step.draws is not None]
    return SampledTokens(
        torch.cat([step.token_ids for step in steps]),
        torch.cat([step.head_ids for step in steps]).int(),
        torch.cat([step.logprobs for step in steps]),
        False,
        False,
        type(draws[0]).joined(draws) if draws else None,
    )


def assert_same(actual: SampledTokens, order: Order, name: str, index: int) -> None:
    expected = expected_tokens(order, name, index, len(actual.token_ids))
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.head_ids, expected.head_ids)
    assert torch.equal(actual.token_logprobs, expected.token_logprobs)
    assert (actual.token_ids.dtype, actual.head_ids.dtype) == (torch.int64, torch.int32)
    assert (actual.draws is None) == (expected.draws is None)
    if actual.draws is not None and expected.draws is not None:
        assert torch.equal(actual.draws.ids, expected.draws.ids)
        assert torch.equal(actual.draws.logprobs, expected.draws.logprobs)


def test_rows_move_and_orders_mix() -> None:
    """A sequence does not depend on its place in the batch, or on the other sequences."""
    a = order_of(SETTINGS, [5, -6, 7], 4, used=3)
    b = order_of(replace(SETTINGS, seed=None, top_k=0, temperature=1.2), [5], 4)
    c = order_of(replace(SETTINGS, draws=0, seed=12, vocab_size=7), [5, 8], 4)
    batches = Batches(a=a, b=b, c=c)
    batches.step(("a-0", 0), ("b-0", 0), ("a-1", 0))
    batches.step(("a-1", 1), ("c-1", 0), ("a-0", 1), ("probe", 0), ("b-0", 1))
    batches.step(("c-1", 1), ("c-0", 0), ("a-2", 0))
    batches.step(("a-2", 1), ("a-0", 2), ("c-0", 1), ("a-1", 2))
    for name, order, lengths in (("a", a, [3, 3, 2]), ("b", b, [2]), ("c", c, [2, 2])):
        for index, length in enumerate(lengths):
            tokens = batches.take_tokens(order, name, index, length)
            assert len(tokens.token_ids) == length
            assert_same(tokens, order, name, index)


def test_the_tokens_go_to_their_rows() -> None:
    order = order_of(SETTINGS, [1, 2], 4)
    batches = Batches(a=order)
    ids = batches.step(("probe", 0), ("a-1", 0), ("a-0", 0), due=[True, True, False])
    assert ids.tolist() == [0, int(expected_tokens(order, "a", 1, 1).token_ids), 0]


def test_a_token_that_is_not_due_or_beyond_the_limit_has_no_record() -> None:
    """Chunks of a prompt have logits, too, and vLLM may run one step more than needed."""
    order = order_of(SETTINGS, [1], 2)
    batches = Batches(a=order)
    batches.step(("a-0", -5), due=[False])
    batches.step(("a-0", 0))
    batches.step(("a-0", 1))
    batches.step(("a-0", 2))
    assert_same(batches.take_tokens(order, "a", 0, 2), order, "a", 0)


def test_versions_are_those_of_each_token() -> None:
    order = order_of(SETTINGS, [1, 2], 5)
    batches = Batches(a=order)
    for position, version in enumerate([3, 3, 4, 9, 9]):
        batches.worker.version = version
        batches.step(("a-0", position))
    batches.step(("a-1", 0))
    assert batches.take_tokens(order, "a", 0, 5).versions == ((3, 2), (4, 1), (9, 2))
    assert batches.take_tokens(order, "a", 0, 3).versions == ((3, 2), (4, 1))
    assert batches.take_tokens(order, "a", 1, 1).versions == ((9, 1),)


def test_a_token_that_is_sampled_again_replaces_its_record() -> None:
    """vLLM discards tokens in flight when it recomputes a sequence."""
    order = order_of(SETTINGS, [1], 3)
    batches = Batches(a=order)
    batches.worker.version = 1
    for position in range(3):
        batches.step(("a-0", position))
    batches.worker.version = 2
    batches.step(("a-0", 2))
    assert batches.take_tokens(order, "a", 0, 3).versions == ((1, 2), (2, 1))


def test_a_dropped_order_is_gone() -> None:
    order = order_of(SETTINGS, [1], 3)
    batches = Batches(a=order)
    batches.step(("a-0", 0))
    batches.worker.drop("a")
    batches.worker.drop("never seen")
    with pytest.raises(KeyError):
        batches.worker.take("a", [(0, 1)])


def test_an_order_uses_memory_for_what_was_sampled() -> None:
    """Arrays for the full limits would take 45 GB."""
    order = order_of(
        replace(SETTINGS, top_k=32, draws=8, stream_tokens=32_000), list(range(4000)), 32_000
    )
    batches = Batches(a=order)
    before = psutil.Process().memory_info().rss
    batches.step(*((f"a-{index}", 0) for index in range(0, 4000, 100)))
    batches.step(*((f"a-{index}", 1) for index in range(0, 4000, 100)))
    assert psutil.Process().memory_info().rss - before < 100e6
    assert_same(batches.take_tokens(order, "a", 3900, 2), order, "a", 3900)


def test_ended_sequences_are_fetched_together() -> None:
    running = RunningOrder("a", order_of(SETTINGS, [1, 2, 3], 3))
    ended = [EndedSequence(index, 2, False, False) for index in range(3)]

    async def collect_ended() -> list[list[EndedSequence]]:
        running.put(ended[0])
        first = await running.wait_for_ended()
        running.put(ended[1])
        running.put(ended[2])
        return [first, await running.wait_for_ended()]

    assert asyncio.run(collect_ended()) == [ended[:1], ended[1:]]


def test_one_fetch_is_bounded() -> None:
    running = RunningOrder("a", order_of(SETTINGS, [1, 2, 3], 3))
    long_sequences = [EndedSequence(index, 10**6, False, False) for index in range(3)]

    async def collect_ended() -> list[list[EndedSequence]]:
        for sequence in long_sequences:
            running.put(sequence)
        return [await running.wait_for_ended() for _ in long_sequences]

    assert asyncio.run(collect_ended()) == [[sequence] for sequence in long_sequences]


def test_a_fault_comes_before_what_has_ended() -> None:
    running = RunningOrder("a", order_of(SETTINGS, [1, 2], 3))
    running.put(EndedSequence(0, 2, False, False))
    running.fail(Corrupt("first"))
    running.fail(Corrupt("second"))
    with pytest.raises(Corrupt, match="first"):
        asyncio.run(running.wait_for_ended())


@pytest.mark.parametrize(
    ("tokens", "before", "length"),
    [("abxycd", 0, 4), ("abxycd", 3, 4), ("abxycd", 4, None), ("abcd", 0, None), ("xyxy", 2, 4)],
)
def test_the_first_mark_that_new_tokens_close(tokens: str, before: int, length: int) -> None:
    tokenizer = tiny.tokenizer("abcdxy")
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in tokens]
    assert closed_length(ids, before, Marks(tokenizer, ["xy"])) == length
