"""What the student writes, and what it believed while writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import TokenSequence
from student_trainer.rollouts.sampler import Sampler, Written, noise_of


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one answer. Row i of the tensors here is about token `start + i`.

    head_ids [T - start, k] int64, the sampling policy's top-k; token_logprobs [T - start] float32,
    its log-prob of what it sampled; own [T - start] bool, None where all are: the student wrote it.
    What an environment wrote is read, never learned, and the rows of it mean nothing. On the CPU.
    """

    head_ids: Tensor
    token_logprobs: Tensor
    truncated: bool  # it was cut at max_new_tokens
    answer: str  # the reference
    teacher: str = ""  # the name of who is to score it, where there are several
    own: Tensor | None = None
    concluded: str | None = None  # what an environment took for the answer; None: all that is own
    queries: int = 0  # of the environment
    failed: bool = False  # the environment gave up: the student is not to blame
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the prompt
    text: str = ""  # of the prompt, as its data has it

    @property
    def places(self) -> Tensor:
        every = super().places
        return every if self.own is None else every[self.own]

    def answer_text(self, tokenizer: Any) -> str:
        """What is to be judged."""
        if self.concluded is not None:
            return self.concluded
        return str(tokenizer.decode(self.token_ids[self.places], skip_special_tokens=True))


class Rollouts(Protocol):
    """Who writes the answers to prompts."""

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Rollouts of prompts [i], as rollout number numbers[i], in batches as they are done."""


class HuggingFaceRollouts:
    """Answers of one turn.

    Every rollout has its own stream of random numbers, decided by (seed, number of the rollout):
    what it samples does not depend on the batch or the process it is in.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        top_k: int,
        temperature: float,
        max_new_tokens: int,
        batch_tokens: int,
        bf16: bool = False,
    ) -> None:
        """`model`: a transformers causal LM; `top_k` may be 0; `batch_tokens` bounds a batch."""
        self._sampler = Sampler(model, tokenizer, top_k=top_k, temperature=temperature, bf16=bf16)
        self._max_new_tokens = max_new_tokens
        self._batch_tokens = batch_tokens

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """As Rollouts'."""
        most = self._max_new_tokens
        for part in batches(prompts, most, self._batch_tokens):
            noise = None if greedy else [noise_of(n, seed, most) for n in numbers[part]]
            before = [torch.from_numpy(prompt.ids).long() for prompt in prompts[part]]
            written = self._sampler.write(before, [most] * len(before), noise)
            yield [_rollout(*pair) for pair in zip(prompts[part], written, strict=True)]


def batches(prompts: Sequence[Prompt], max_new_tokens: int, batch_tokens: int) -> Iterator[slice]:
    """Which prompts are answered together, in at most `batch_tokens` tokens with their padding."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0) + max_new_tokens
    size = max(1, batch_tokens // longest)
    return (slice(first, first + size) for first in range(0, len(prompts), size))


def _rollout(prompt: Prompt, written: Written) -> Rollout:
    return Rollout(
        token_ids=torch.cat([torch.from_numpy(prompt.ids).long(), written.token_ids]),
        start=len(prompt.ids),
        head_ids=written.head_ids,
        token_logprobs=written.token_logprobs,
        truncated=not written.ended,
        answer=prompt.answer,
        teacher=prompt.teacher,
        fields=prompt.fields,
        text=prompt.text,
    )
