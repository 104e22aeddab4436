"""Writes on where sequences end, and records what was believed while writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)


@dataclass(frozen=True)
class SampledTokens:
    """L tokens that were added to a sequence, on the CPU.

    token_ids [L] int64; head_ids [L, k] int64, the policy's top-k; token_logprobs [L] float32, its
    log-prob of what it sampled. `ended`: by a token that ends an answer; `closed`: by a mark.
    """

    token_ids: Tensor
    head_ids: Tensor
    token_logprobs: Tensor
    ended: bool
    closed: bool


class Marks:
    """Texts that end a turn as soon as they are written, whatever tokens they are written in."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(map(len, texts))
        last = {text[-1] for text in texts}
        ids = range(len(tokenizer))
        closing = [bool(last & set(self._text([number]))) for number in ids]
        self._closing = torch.tensor(closing)

    def may_close(self, ids: Tensor) -> Tensor:
        """Which tokens could be the last ones of a mark: bool, of the shape of `ids`."""
        inside = ids < len(self._closing)  # a model may have more ids than its tokenizer
        return inside & self._closing.to(ids.device)[ids.clamp(max=len(self._closing) - 1)]

    def closed_by(self, ids: Tensor) -> bool:
        """Whether the last of these tokens [n] completes a mark."""
        # A token of a mark has at least one of its characters.
        near = ids[-self._longest :].tolist()
        return any(text in self._text(near) for text in self._texts)

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


class Sampler:
    """Samples with `model.generate`; the sampling itself is ours, so that it can be recorded."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        top_k: int,
        temperature: float,
        top_p: float = 1.0,
        bf16: bool = False,
    ) -> None:
        """`model`: a transformers causal LM; `top_k` may be 0. `top_p`: tokens are drawn from the
        likeliest ones that have this much probability together; what is recorded is the policy
        before that.
        """
        self._model = model
        self._top_k = top_k
        self._temperature = temperature
        self._top_p = top_p
        self._bf16 = bf16
        self._ends = end_ids(model, tokenizer)
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    @torch.no_grad()
    def write(
        self,
        before: Sequence[Tensor],
        limits: Sequence[int],
        noise: Sequence[Tensor] | None,
        marks: Marks | None = None,
    ) -> list[SampledTokens]:
        """What follows the tokens before[i] [T_i]: at most limits[i] tokens, up to an end or one of
        `marks`. noise[i] [limits[i]]: uniform, one a token; None: the most likely token is taken.
        """
        device = self._model.device
        width = max(map(len, before))
        ids = torch.zeros(len(before), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(before):
            ids[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        levels = None
        if noise is not None:
            levels = torch.nn.utils.rnn.pad_sequence(list(noise), batch_first=True).to(device)
        recorder = _SamplingRecorder(self._top_k, self._temperature, self._top_p, levels)
        stop = _Stop(width, torch.tensor(limits, device=device), marks)
        own, self._model.generation_config = self._model.generation_config, self._config(limits)
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
                whole = self._model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=self._model.generation_config,
                    logits_processor=LogitsProcessorList([recorder]),
                    stopping_criteria=StoppingCriteriaList([stop]),
                )
        finally:
            self._model.generation_config = own
        recorded = zip(whole[:, width:].cpu(), *recorder.recorded(), limits, strict=True)
        return [self._cut(*columns, marks) for columns in recorded]

    def _config(self, limits: Sequence[int]) -> GenerationConfig:
        # Nothing of the model's own generation config (top_p, repetition_penalty, ...) may bend the
        # distribution: the loss is about softmax(logits / temperature).
        return GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=False,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad,
        )

    def _cut(
        self, tokens: Tensor, head: Tensor, logprobs: Tensor, limit: int, marks: Marks | None
    ) -> SampledTokens:
        """Up to the first end; `generate` fills up what is shorter than its neighbours."""
        tokens = tokens[:limit]
        ends = torch.isin(tokens, torch.tensor(self._ends, dtype=torch.long)).nonzero()
        ended = len(ends) > 0
        length = int(ends[0]) + 1 if ended else len(tokens)
        candidates = marks.may_close(tokens[:length]).nonzero().flatten().tolist() if marks else []
        for last in candidates:
            assert marks is not None
            if marks.closed_by(tokens[: last + 1]):
                part = slice(0, last + 1)
                return SampledTokens(
                    tokens[part], head[part], logprobs[part], ended=False, closed=True
                )
        return SampledTokens(tokens[:length], head[:length], logprobs[:length], ended, closed=False)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a line at its own limit, or at a mark. `generate` makes copies of it: it keeps nothing.

    Lines that ended are filled up, so that what was found once must not be looked for again.
    """

    def __init__(self, width: int, limits: Tensor, marks: Marks | None) -> None:
        self._width = width  # tokens that were there before
        self._limits = limits  # [B]
        self._marks = marks

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        written = input_ids[:, self._width :]
        done = self._limits <= written.shape[1]
        if self._marks is not None:
            for row in self._marks.may_close(written[:, -1]).nonzero().flatten().tolist():
                done[row] |= self._marks.closed_by(written[row])
        return done


class _SamplingRecorder(LogitsProcessor):  # type: ignore[misc]
    """Samples by inverse CDF, records the policy, and leaves one token for a greedy `generate`."""

    def __init__(self, top_k: int, temperature: float, top_p: float, noise: Tensor | None) -> None:
        self._top_k = top_k
        self._temperature = temperature
        self._top_p = top_p
        self._noise = noise  # [B, tokens] uniform; None: take the most likely token
        self._heads: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = (scores.float() / self._temperature).log_softmax(1)
        if self._noise is None:
            chosen = logprobs.argmax(1, keepdim=True)
        else:
            # float64: over 150k tokens a float32 sum loses what the unlikely ones add.
            probabilities = logprobs.double().exp()
            if self._top_p < 1:
                probabilities = nucleus(probabilities, self._top_p)
            cumulative = probabilities.cumsum(1)
            level = self._noise[:, len(self._heads), None] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, level, right=True)
            chosen = chosen.clamp(max=scores.shape[1] - 1)
        self._heads.append(logprobs.topk(self._top_k, dim=1).indices)
        self._logprobs.append(logprobs.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def recorded(self) -> tuple[Tensor, Tensor]:
        """head ids [B, L, k] and log-probs of the sampled tokens [B, L]."""
        return torch.stack(self._heads, 1).cpu(), torch.stack(self._logprobs, 1).cpu()


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """[B, V]: those of the likeliest tokens that have `top_p` together, zero for all others
    (Holtzman et al., arXiv 1904.09751). The likeliest one always stays.
    """
    ordered, ids = probabilities.sort(1, descending=True)
    likelier = ordered.cumsum(1) - ordered
    return torch.zeros_like(probabilities).scatter_(1, ids, ordered * (likelier < top_p))


def noise_of(number: int, seed: int, tokens: int) -> Tensor:
    """The random numbers [tokens] float64 of rollout `number`: nothing else decides them."""
    generator = torch.Generator().manual_seed(seed * 1_000_000_007 + number)
    return torch.rand(tokens, generator=generator, dtype=torch.float64)


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the tokenizer's, and those of the model's own settings."""
    ends: set[int] = set()
    for found in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        ends.update(found if isinstance(found, list) else [] if found is None else [found])
    return sorted(ends)
