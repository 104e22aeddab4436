"""Single-turn rollouts of a rollout engine, with the weights that were published last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollouts.hf import rollout_of


def requests_of(
    prompts: Sequence[Prompt], numbers: Sequence[int], limit: int
) -> list[SequenceRequest]:
    """Return the requests of completions of at most `limit` tokens."""
    return [
        SequenceRequest(torch.from_numpy(prompt.ids).long(), number, limit)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


class EngineRollouts:
    """Samples one completion per prompt at the rollout services of the job."""

    def __init__(
        self,
        client: EngineClient,
        settings: SamplingSettings,
        weights: Callable[[], WeightsVersion],
    ) -> None:
        """`settings`: of all orders, apart from the seed. `weights`: returns those to sample with.

        A completion has at most `settings.stream_tokens` tokens.
        """
        self._client = client
        self._settings = settings
        self._weights = weights

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `Rollouts.generate`. Raises the error of the engine."""
        if not prompts:
            return
        settings = replace(self._settings, seed=None if greedy else seed)
        requests = requests_of(prompts, numbers, settings.stream_tokens)
        found: dict[int, Rollout] = {}
        due = 0
        for index, tokens in self._client.sample(Order(self._weights(), settings, requests)):
            found[index] = rollout_of(prompts[index], tokens)
            ready = []
            while due in found:
                ready.append(found.pop(due))
                due += 1
            if ready:
                yield ready
