"""What the student writes, and what it believed while writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from student_trainer.prompts import Prompt
from student_trainer.token_sequence import TokenSequence


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one answer. Row i of the tensors here is about token `start + i`.

    head_ids [T - start, k] int64, the sampling policy's top-k; token_logprobs [T - start] float32,
    its log-prob of what it sampled. On the CPU.
    """

    head_ids: Tensor
    token_logprobs: Tensor
    truncated: bool  # it was cut at max_new_tokens
    answer: str  # the reference
    teacher: str = ""  # the name of who is to score it, where there are several


class HuggingFaceRollouts:
    """Samples with `model.generate`; the sampling itself is ours, so that it can be recorded.

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
        self._bf16 = bf16
        self._model = model
        self._top_k = top_k
        self._temperature = temperature
        self._batch_tokens = batch_tokens
        self._max_new_tokens = max_new_tokens
        self._ends = end_ids(model, tokenizer)
        # Nothing of the model's own generation config (top_p, repetition_penalty, ...) may bend the
        # distribution: the loss is about softmax(logits / temperature).
        self._config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self._ends or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Rollouts of prompts [i], as rollout number numbers[i], in batches as they are done."""
        longest = max((len(prompt.ids) for prompt in prompts), default=0) + self._max_new_tokens
        size = max(1, self._batch_tokens // longest)
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            noise = None if greedy else self._noise(numbers[part], seed)
            yield self._batch(prompts[part], noise)

    def _noise(self, numbers: Sequence[int], seed: int) -> Tensor:
        streams = []
        for number in numbers:
            generator = torch.Generator().manual_seed(seed * 1_000_000_007 + number)
            streams.append(
                torch.rand(self._max_new_tokens, generator=generator, dtype=torch.float64)
            )
        return torch.stack(streams)

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Prompt], noise: Tensor | None) -> list[Rollout]:
        device = self._model.device
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        noise = None if noise is None else noise.to(device)
        recorder = _SamplingRecorder(self._top_k, self._temperature, noise)
        own, self._model.generation_config = self._model.generation_config, self._config
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
                written = self._model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=self._config,
                    logits_processor=LogitsProcessorList([recorder]),
                )
        finally:
            self._model.generation_config = own
        head_ids, logprobs = recorder.recorded()
        return [
            self._rollout(prompt, tokens, head, logprob)
            for prompt, tokens, head, logprob in zip(
                prompts, written[:, width:].cpu(), head_ids, logprobs, strict=True
            )
        ]

    def _rollout(self, prompt: Prompt, tokens: Tensor, head: Tensor, logprobs: Tensor) -> Rollout:
        ends = torch.isin(tokens, torch.tensor(self._ends, dtype=torch.long)).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        return Rollout(
            token_ids=torch.cat([torch.from_numpy(prompt.ids).long(), tokens[:length]]),
            start=len(prompt.ids),
            head_ids=head[:length],
            token_logprobs=logprobs[:length],
            truncated=not len(ends),
            answer=prompt.answer,
            teacher=prompt.teacher,
        )


class _SamplingRecorder(LogitsProcessor):  # type: ignore[misc]
    """Samples by inverse CDF, records the policy, and leaves one token for a greedy `generate`."""

    def __init__(self, top_k: int, temperature: float, noise: Tensor | None) -> None:
        self._top_k = top_k
        self._temperature = temperature
        self._noise = noise  # [B, max_new_tokens] uniform; None: take the most likely token
        self._heads: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = (scores.float() / self._temperature).log_softmax(1)
        if self._noise is None:
            chosen = logprobs.argmax(1, keepdim=True)
        else:
            # float64: over 150k tokens a float32 sum loses what the unlikely ones add.
            cumulative = logprobs.double().exp().cumsum(1)
            level = self._noise[:, len(self._heads), None] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, level, right=True)
            chosen = chosen.clamp(max=scores.shape[1] - 1)
        self._heads.append(logprobs.topk(self._top_k, dim=1).indices)
        self._logprobs.append(logprobs.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def recorded(self) -> tuple[Tensor, Tensor]:
        """head ids [B, L, k] and log-probs of the sampled tokens [B, L]."""
        return torch.stack(self._heads, 1).cpu(), torch.stack(self._logprobs, 1).cpu()


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the tokenizer's, and those of the model's own settings."""
    ends: set[int] = set()
    for found in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        ends.update(found if isinstance(found, list) else [] if found is None else [found])
    return sorted(ends)
