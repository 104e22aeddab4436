"""The interface of rollout samplers, and single-turn sampling with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.sampler import SampledTokens, Sampler, rollout_noise


class Rollouts(Protocol):
    """Samples completions of prompts with the student.

    in_process: True if this process samples, inside `student.gathered()`; False if an engine
    samples.
    """

    in_process: bool

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield the rollouts of the prompts in order, batch by batch.

        - numbers: numbers[i] is the rollout number of prompts[i]. Together with `seed`, it fixes
          the random numbers of the rollout.
        - greedy: take the most likely token instead of sampling.
        """


def sampling_context(
    student: Replicated | Sharded, rollouts: Rollouts
) -> AbstractContextManager[None]:
    """Collective. Return the context in which `generate` must be called.

    The context gathers the weights of the student, but only if this process samples.
    """
    return student.gathered() if rollouts.in_process else nullcontext()


class HuggingFaceRollouts:
    """Samples one completion per prompt.

    Each rollout has its own stream of random numbers, fixed by the seed and the rollout number. So
    a completion does not depend on its batch or process, except for rounding in the model.
    """

    in_process = True

    def __init__(self, sampler: Sampler, *, max_new_tokens: int, batch_tokens: int) -> None:
        """Set up the rollouts.

        - max_new_tokens: maximum tokens of a completion.
        - batch_tokens: maximum tokens of a batch, including padding.
        """
        self._sampler = sampler
        self._max_new_tokens = max_new_tokens
        self._batch_tokens = batch_tokens

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `Rollouts.generate`."""
        max_tokens = self._max_new_tokens
        for batch in batches(
            [len(prompt.ids) for prompt in prompts], max_tokens, self._batch_tokens
        ):
            noise = draw_noise = None
            if not greedy:
                noise = [rollout_noise(number, seed, max_tokens) for number in numbers[batch]]
                draw_noise = [
                    rollout_noise(number, seed, max_tokens, draws=True) for number in numbers[batch]
                ]
            before = [torch.from_numpy(prompt.ids).long() for prompt in prompts[batch]]
            limits = [max_tokens] * len(before)
            images = [prompt.images for prompt in prompts[batch]]
            completions = self._sampler.write(
                before, limits, noise, draw_noise=draw_noise, images=images
            )
            yield [build_rollout(*pair) for pair in zip(prompts[batch], completions, strict=True)]


def batches(lengths: Sequence[int], max_new_tokens: int, batch_tokens: int) -> Iterator[slice]:
    """Yield slices of sequences that are sampled together in one batch.

    - lengths: the number of tokens of each sequence before sampling.
    - batch_tokens: maximum tokens of a batch, including padding and sampled tokens.

    A slice has at least one sequence, even if this sequence alone exceeds `batch_tokens`.
    """
    longest = max(lengths, default=0) + max_new_tokens
    size = max(1, batch_tokens // longest)
    return (slice(first, first + size) for first in range(0, len(lengths), size))


def build_rollout(prompt: Prompt, completion: SampledTokens) -> Rollout:
    """Return the rollout that consists of a prompt and the tokens sampled after it."""
    return Rollout(
        token_ids=torch.cat([torch.from_numpy(prompt.ids).long(), completion.token_ids]),
        start=len(prompt.ids),
        head_ids=completion.head_ids,
        token_logprobs=completion.token_logprobs,
        truncated=not completion.ended,
        draws=completion.draws,
        answer=prompt.answer,
        teacher=prompt.teacher,
        fields=prompt.fields,
        text=prompt.text,
        weight=prompt.weight,
        versions=completion.versions,
        images=prompt.images,
    )
