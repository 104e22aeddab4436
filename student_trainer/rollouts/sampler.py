"""Samples completions with `model.generate`, and records head ids, log-probs and tail draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from clients.data.models.shape import rope_switch
from clients.data.tokens.answers import end_ids
from student_trainer.data.images import SequenceImages, image_inputs
from student_trainer.data.sequence import TailDraws
from student_trainer.rollouts.narrow_cache import CACHE_ARGUMENT, make_cache
from student_trainer.rollouts.sample_step import SampledStep, sample_step

# Added to the seed of the random numbers that draw from the tail. It flips the highest of the 32
# bits that the generator uses, so these numbers differ from the numbers of all rollouts of a job.
_DRAW_STREAM = 1 << 31


@dataclass(frozen=True)
class SampledTokens:
    """The L tokens that were sampled for one sequence, on the CPU.

    - token_ids [L] int64: the sampled tokens.
    - head_ids [L, k] int32: the top-k ids of the policy.
    - token_logprobs [L] float32: the policy's log-probs of the tokens, in nats.
    - ended: True if the last token is an end token.
    - closed: True if the last token completes one of the `Marks`.
    - draws: the ids drawn from the tail for the L tokens; None if there are none.
    - versions: (version of the weights, number of consecutive tokens), in the order of the tokens;
      empty if the trainer's own process sampled them.
    """

    token_ids: Tensor
    head_ids: Tensor
    token_logprobs: Tensor
    ended: bool
    closed: bool
    draws: TailDraws | None = None
    versions: tuple[tuple[int, int], ...] = ()


class Marks:
    """Texts that end a turn of a rollout when the student writes them, in any tokenization."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(map(len, texts))
        last_characters = {text[-1] for text in texts}
        token_ids = range(len(tokenizer))
        may_close = [bool(last_characters & set(self._decode([number]))) for number in token_ids]
        self._closing = torch.tensor(may_close)

    def may_close(self, ids: Tensor) -> Tensor:
        """Return a mask of the tokens that could be the last token of a mark; same shape as `ids`.

        This is a fast filter: it is True for every token that contains the last character of a
        mark.
        """
        is_token = ids < len(self._closing)  # a model may have more ids than its tokenizer has
        return is_token & self._closing.to(ids.device)[ids.clamp(max=len(self._closing) - 1)]

    def closed_by(self, ids: Tensor) -> bool:
        """Return True if the last token of `ids` [n] completes a mark.

        The method decodes as many of the last tokens as the longest mark has characters.
        """
        # Each token of a mark has at least one of its characters.
        last_ids = ids[-self._longest :].tolist()
        return any(text in self._decode(last_ids) for text in self._texts)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


class Sampler:
    """Samples completions with `model.generate`.

    A logits processor draws the tokens and records them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        top_k: int,
        temperature: float,
        top_p: float = 1.0,
        draws: int = 0,
        vocab_size: int | None = None,
        bf16: bool = False,
        never: int | None = None,
        equal_lengths: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        """Set up the sampler of `model`, a transformers causal LM.

        - top_k: the number of head ids to record per token, may be 0.
        - top_p: draw from the most likely tokens with this total probability (nucleus sampling).
          The records describe the policy without this restriction: softmax(logits / temperature).
        - draws: the number of ids per token to draw from the tail, the ids outside the head.
        - vocab_size: the policy has only the first `vocab_size` ids; None: all ids.
        - bf16: compute in bfloat16.
        - never: an id that must not be sampled.
        - equal_lengths: True if padding changes the model's results (`probe_sampling`). Then only
          sequences of equal length share a batch.
        - ends: ids that end a sequence; if empty, the ids of `end_ids`.
        """
        self._model = model
        self._top_k = top_k
        self._temperature = temperature
        self._top_p = top_p
        self._draws = draws
        self._vocab_size = vocab_size
        self._bf16 = bf16
        self._never = never
        self._equal_lengths = equal_lengths
        self._rope_switch = rope_switch(model.config.get_text_config())
        self._ends = list(ends) or end_ids(model.generation_config, tokenizer)
        # The padding id, which fills sequences after their ends. The tokenizer's own padding id may
        # have no embedding.
        self._pad = 0

    @torch.no_grad()
    def write(
        self,
        before: Sequence[Tensor],
        limits: Sequence[int],
        noise: Sequence[Tensor] | None,
        marks: Marks | None = None,
        draw_noise: Sequence[Tensor] | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        images: Sequence[SequenceImages | None] = (),
    ) -> list[SampledTokens]:
        """Sample tokens after each of the sequences `before`; not thread-safe. No gradient.

        - before: before[i] [T_i] int64 are the tokens of sequence i.
        - limits: limits[i] is the maximum number of tokens to sample.
        - noise: noise[i] [limits[i]] float64 are uniform random numbers in [0, 1), one per token;
          None takes the most likely tokens.
        - marks: a completion stops at an end token or at one of these texts.
        - draw_noise: draw_noise[i] [limits[i]] float64 are the random numbers for the draws from
          the tail; None draws none.
        - is_cancelled: called for each token; if it returns True, all completions end at their
          current tokens.
        - images: images[i] are the images of before[i], if any.

        This method temporarily replaces the model's `generation_config`.
        """
        lengths = [len(tokens) for tokens in before]
        longest = max(lengths) + max(limits)
        if not self._equal_lengths and (self._rope_switch is None or longest <= self._rope_switch):
            lengths = [0] * len(before)
        completions: dict[int, SampledTokens] = {}
        for length in sorted(set(lengths)):
            rows = [row for row, other_length in enumerate(lengths) if other_length == length]
            batch = self._write_batch(
                [before[row] for row in rows],
                [limits[row] for row in rows],
                None if noise is None else [noise[row] for row in rows],
                None if draw_noise is None else [draw_noise[row] for row in rows],
                [images[row] for row in rows] if images else (),
                marks=marks,
                is_cancelled=is_cancelled,
            )
            completions |= zip(rows, batch, strict=True)
        return [completions[row] for row in range(len(before))]

    def _write_batch(
        self,
        before: Sequence[Tensor],
        limits: Sequence[int],
        noise: Sequence[Tensor] | None,
        draw_noise: Sequence[Tensor] | None,
        images: Sequence[SequenceImages | None],
        *,
        marks: Marks | None,
        is_cancelled: Callable[[], bool],
    ) -> list[SampledTokens]:
        """Sample one batch, padded on the left; see `write`."""
        device = self._model.device
        uniforms, draw_uniforms = (
            None if numbers is None else pad_sequence(list(numbers), batch_first=True).to(device)
            for numbers in (noise, draw_noise if self._draws else None)
        )
        recorder = _SamplingRecorder(
            self._top_k,
            self._temperature,
            self._top_p,
            uniforms,
            self._draws,
            draw_uniforms,
            self._vocab_size,
            self._never,
        )
        width = max(map(len, before))
        stop_criteria = _Stop(width, torch.tensor(limits, device=device), marks, is_cancelled)
        sequences = self._generate(before, max(limits), recorder, [stop_criteria], images)
        records = zip(sequences[:, width:].cpu(), *recorder.records(), limits, strict=True)
        return [self._truncate(*columns, marks) for columns in records]

    def plain_ids(self, count: int) -> Tensor:
        """Return `count` token ids of the policy that are not end tokens, [count] int64."""
        vocab_size = self._vocab_size or self._model.config.get_text_config().vocab_size
        ids = [token_id for token_id in range(min(vocab_size, 64)) if token_id not in self._ends]
        return torch.tensor((ids * count)[-count:])

    @torch.no_grad()
    def continuation_logits(self, before: Sequence[Tensor], after: Tensor) -> Tensor:
        """Return the logits [B, n, V] with which `write` would sample the tokens `after` [B, n].

        The logits [i, t] are computed from before[i] and after[i, :t], in one batch, token by
        token. `after` must not contain end tokens.
        """
        forcer = _TokenForcer(after.to(self._model.device))
        self._generate(before, after.shape[1], forcer, [], ())
        return torch.stack(forcer.logits, 1)

    def _generate(
        self,
        before: Sequence[Tensor],
        max_tokens: int,
        processor: LogitsProcessor,
        stop_criteria: Sequence[StoppingCriteria],
        images: Sequence[SequenceImages | None],
    ) -> Tensor:
        """Run `model.generate`, and return the sequences with their new tokens, padded on the left.

        `processor`: chooses each new token.
        """
        device = self._model.device
        width = max(map(len, before))
        ids = torch.zeros(len(before), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(before):
            ids[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        inputs = image_inputs(images, ids) or {}
        own_config = self._model.generation_config
        self._model.generation_config = self._generation_config(max_tokens)
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
                sequences: Tensor = self._model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=self._model.generation_config,
                    **{name: tensor.to(device) for name, tensor in inputs.items()},
                    **{CACHE_ARGUMENT: make_cache(self._model, bf16=self._bf16)},
                    logits_processor=LogitsProcessorList([processor]),
                    stopping_criteria=StoppingCriteriaList(stop_criteria),
                )
        finally:
            self._model.generation_config = own_config
        return sequences

    def _generation_config(self, max_tokens: int) -> GenerationConfig:
        # The model's own generation config (top_p, repetition_penalty, ...) must not change the
        # distribution: the loss is computed for softmax(logits / temperature).
        return GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad,
        )

    def _truncate(
        self,
        tokens: Tensor,
        head: Tensor,
        logprobs: Tensor,
        draws: TailDraws | None,
        limit: int,
        marks: Marks | None,
    ) -> SampledTokens:
        """Return the sampled tokens up to the first end token, the first mark or the limit.

        `generate` fills sequences that end early with padding, which is removed here.
        """
        tokens = tokens[:limit]
        ends = torch.isin(tokens, torch.tensor(self._ends, dtype=torch.long)).nonzero()
        ended, closed = len(ends) > 0, False
        length = int(ends[0]) + 1 if ended else len(tokens)
        candidates = marks.may_close(tokens[:length]).nonzero().flatten().tolist() if marks else []
        for position in candidates:
            assert marks is not None
            if marks.closed_by(tokens[: position + 1]):
                length, ended, closed = position + 1, False, True
                break
        sampled = slice(0, length)
        return SampledTokens(
            tokens[sampled],
            head[sampled],
            logprobs[sampled],
            ended,
            closed,
            None if draws is None else draws[sampled],
        )


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Stops a sequence at its own limit or at a mark. A cancellation stops all sequences.

    `generate` copies this object, so it must have no state. It checks only the last token of a
    sequence: `generate` itself remembers which sequences have ended, and pads them.
    """

    def __init__(
        self,
        width: int,
        limits: Tensor,
        marks: Marks | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._width = width  # number of tokens before the sampled tokens
        self._limits = limits  # [B]
        self._marks = marks
        self._is_cancelled = is_cancelled

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        sampled_ids = input_ids[:, self._width :]
        is_stopped = self._limits <= sampled_ids.shape[1]
        if self._is_cancelled():
            return torch.ones_like(is_stopped)
        if self._marks is not None:
            for row in self._marks.may_close(sampled_ids[:, -1]).nonzero().flatten().tolist():
                is_stopped[row] |= self._marks.closed_by(sampled_ids[row])
        return is_stopped


class _TokenForcer(LogitsProcessor):  # type: ignore[misc]
    """Forces a greedy `generate` to select given tokens, and records the logits.

    logits: the logits of each step, [B, V] float32.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens  # [B, n]
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = self._tokens[:, len(self.logits), None]
        self.logits.append(scores.float())
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


class _SamplingRecorder(LogitsProcessor):  # type: ignore[misc]
    """Samples tokens by inverse CDF, and records the policy.

    All logits except that of the sampled token become -inf, so a greedy `generate` selects this
    token.
    """

    def __init__(
        self,
        top_k: int,
        temperature: float,
        top_p: float,
        noise: Tensor | None,
        draws: int,
        draw_noise: Tensor | None,
        vocab_size: int | None,
        never: int | None,
    ) -> None:
        self._top_k = top_k
        self._temperature = temperature
        self._top_p = top_p
        self._noise = noise  # [B, tokens] uniform; None: greedy
        self._count = draws
        self._draw_noise = draw_noise  # [B, tokens] uniform; None: no draws
        self._vocab_size = vocab_size
        self._never = never
        self._steps: list[SampledStep] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step_index = len(self._steps)
        noise, draw_noise = (
            None if numbers is None else numbers[:, step_index]
            for numbers in (self._noise, self._draw_noise)
        )
        step = sample_step(
            scores[:, : self._vocab_size],
            top_k=self._top_k,
            temperature=self._temperature,
            uniforms=noise,
            top_p=self._top_p,
            draws=self._count,
            draw_uniforms=draw_noise,
            never=self._never,
        )
        self._steps.append(step)
        return torch.full_like(scores, -torch.inf).scatter_(1, step.token_ids[:, None], 0.0)

    def records(self) -> tuple[Tensor, Tensor, Sequence[TailDraws | None]]:
        """Return head ids, log-probs of the tokens, and draws, on the CPU.

        - head ids: [B, L, k] int32, where L is the number of tokens of the longest completion.
        - log-probs: [B, L], in nats.
        - draws: one TailDraws for each of the B sequences; None without draws.
        """
        heads = torch.stack([step.head_ids.int() for step in self._steps], 1).cpu()
        logprobs = torch.stack([step.logprobs for step in self._steps], 1).cpu()
        draws = [step.draws for step in self._steps if step.draws is not None]
        if not draws:
            return heads, logprobs, [None] * len(heads)
        ids = torch.stack([draw.ids for draw in draws], 1).cpu()
        draw_logprobs = torch.stack([draw.logprobs for draw in draws], 1).cpu()
        return heads, logprobs, [TailDraws(*pair) for pair in zip(ids, draw_logprobs, strict=True)]


def rollout_noise(number: int, seed: int, tokens: int, *, draws: bool = False) -> Tensor:
    """Return the uniform random numbers of a rollout, [tokens] float64 in [0, 1).

    They depend only on the rollout's `number`, the seed and `draws`. With `draws`, these are the
    random numbers for the draws from the tail; otherwise those for sampling the tokens.
    """
    stream = _DRAW_STREAM if draws else 0
    generator = torch.Generator().manual_seed(seed * 1_000_000_007 + number + stream)
    return torch.rand(tokens, generator=generator, dtype=torch.float64)
