"""Rollouts that the engines of a job sample: single-turn, or multi-turn with a retriever.

Evaluations sample with the most recently published weights (`generate`). Training selects the
version of the weights for each order (`order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.rollout_client.engine_client import EngineClient, Sampling
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_client.wire import MAX_TOKENS
from student_trainer.rollouts.rollouts import build_rollout
from student_trainer.rollouts.sampler import SampledTokens
from student_trainer.rollouts.search import MARKS, SearchConversations, SearchTurn

# Returns the weights to sample with; called for each order.
ChooseWeights = Callable[[], WeightsVersion]


class EngineRollouts(Protocol):
    """Samples rollouts with the rollout services of a job. Thread-safe.

    `in_process` and `generate` are described in `Rollouts`.
    """

    in_process: bool

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt, in order. Raises the errors of the engine."""

    def order(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], weights: ChooseWeights
    ) -> Iterator[tuple[int, Rollout]]:
        """Return an iterator of (index of the prompt, its rollout), in order of completion.

        `weights`: a function that returns the version of the weights for the next turn. It is
        called before each turn.

        The seed is that of the sampling settings. The iterator may be used in another thread. The
        iterator and this call raise errors of the engine.
        """


class SingleTurnRollouts:
    """Samples one completion per prompt, of at most `settings.stream_tokens` tokens."""

    in_process = False

    def __init__(
        self, client: EngineClient, settings: SamplingSettings, newest: ChooseWeights
    ) -> None:
        """Store the client and the settings. Nothing is sent.

        - settings: the sampling settings of all orders. `generate` uses its own seed instead.
        - newest: a function that returns the version of the weights for `generate`.
        """
        self._client = client
        self._settings = settings
        self._newest = newest
        self._newest_order: Sampling | None = None  # the newest order of `order`

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `EngineRollouts`."""
        if prompts:
            settings = replace(self._settings, seed=None if greedy else seed)
            order = self._build_order(prompts, numbers, self._newest, settings)
            yield from _restore_order(_to_rollouts(prompts, self._client.sample(order)))

    def order(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], weights: ChooseWeights
    ) -> Iterator[tuple[int, Rollout]]:
        """Send an order, and return its rollouts in order of completion; see `EngineRollouts`.

        A service processes orders in the order in which they arrive. So this call first waits until
        the previous order has arrived. It does not wait until its own order has arrived, which
        takes about 20 ms.
        """
        if self._newest_order is not None:
            self._newest_order.wait_until_accepted()
        self._newest_order = self._client.start(
            self._build_order(prompts, numbers, weights, self._settings)
        )
        return _to_rollouts(prompts, self._newest_order)

    def _build_order(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        weights: ChooseWeights,
        settings: SamplingSettings,
    ) -> Order:
        requests = [
            SequenceRequest(torch.from_numpy(prompt.ids).long(), number, settings.stream_tokens)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        return Order(weights(), settings, requests)


class EngineSearch:
    """Samples conversations with a retriever. An order has one turn of each of them."""

    in_process = False

    def __init__(
        self,
        client: EngineClient,
        settings: SamplingSettings,
        newest: ChooseWeights,
        conversations: SearchConversations,
    ) -> None:
        """Store the client and the settings. Nothing is sent.

        - settings: the sampling settings of all orders. This class sets `marks` and `batch_tokens`
          itself, and `generate` uses its own seed.
        - newest: a function that returns the version of the weights for `generate`.
        - conversations: run the conversations, and sample each turn with the engine.
        """
        self._client = client
        self._settings = replace(settings, marks=MARKS)
        self._newest = newest
        self._conversations = conversations

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `EngineRollouts`."""
        settings = replace(self._settings, seed=None if greedy else seed)
        yield from _restore_order(
            self._sample_conversations(prompts, numbers, self._newest, settings)
        )

    def order(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], weights: ChooseWeights
    ) -> Iterator[tuple[int, Rollout]]:
        """Return rollouts in order of completion; see `EngineRollouts`.

        The orders are sent while the caller iterates over the result.
        """
        return self._sample_conversations(prompts, numbers, weights, self._settings)

    def _sample_conversations(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        weights: ChooseWeights,
        settings: SamplingSettings,
    ) -> Iterator[tuple[int, Rollout]]:
        return self._conversations.sample(
            prompts, numbers, lambda turns: self._sample_turns(turns, weights(), settings)
        )

    def _sample_turns(
        self, turns: Sequence[SearchTurn], weights: WeightsVersion, settings: SamplingSettings
    ) -> list[SampledTokens]:
        requests = [
            SequenceRequest(turn.token_ids, turn.number, turn.limit, turn.used) for turn in turns
        ]
        # The turns are one batch: the hf engine must not divide it, for bit-identical results.
        longest = max(len(turn.token_ids) for turn in turns) + max(turn.limit for turn in turns)
        settings = replace(settings, batch_tokens=min(len(turns) * longest, MAX_TOKENS))
        sampled = dict(self._client.sample(Order(weights, settings, requests)))
        return [sampled[index] for index in range(len(turns))]


def _to_rollouts(prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, Rollout]]:
    return ((index, build_rollout(prompts[index], tokens)) for index, tokens in sampling)


def _restore_order(rollouts: Iterator[tuple[int, Rollout]]) -> Iterator[list[Rollout]]:
    """Yield the rollouts in the order of their prompts.

    A rollout is yielded when it and all earlier ones have arrived.
    """
    pending_rollouts: dict[int, Rollout] = {}
    next_index = 0
    for index, rollout in rollouts:
        pending_rollouts[index] = rollout
        ready_rollouts = []
        while next_index in pending_rollouts:
            ready_rollouts.append(pending_rollouts.pop(next_index))
            next_index += 1
        if ready_rollouts:
            yield ready_rollouts
