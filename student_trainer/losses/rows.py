"""Rows: all that a loss may know of a distribution over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The lowest log-prob a loss reckons with: the lowest that f16 rows can carry. A probability of
# exactly zero (a masked token) counts as this much, so that a KL that is infinite on paper stays a
# large number with a finite gradient, and 0 log 0 is 0.
LOWEST_LOGPROB = -65504.0
# Likewise for ratios q/p: the sampling policy cannot draw a token whose ratio is beyond e^60.
HIGHEST_LOG_RATIO = 60.0


@dataclass(frozen=True)
class Rows:
    """What is known of N tokens' distributions, in nats over the full vocabulary.

    head_logprobs [N, K] at the head ids; tail_logmass [N], the log of the mass outside the head
    (-inf when the head is everything); token_logprobs [N] of the actual tokens; sample_logprobs
    [N, M] of tokens that the teacher drew from its tail, if it did (its own may be their mean,
    [N, 1]).
    """

    head_logprobs: Tensor
    tail_logmass: Tensor
    token_logprobs: Tensor
    sample_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tail_logmass)

    def detach(self) -> Rows:
        return self.map(Tensor.detach)

    def __getitem__(self, index: slice) -> Rows:
        return self.map(lambda values: values[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Each tensor changed."""
        samples = self.sample_logprobs
        return Rows(
            change(self.head_logprobs),
            change(self.tail_logmass),
            change(self.token_logprobs),
            None if samples is None else change(samples),
        )


def rows_from_logits(
    logits: Tensor,
    head_ids: Tensor,
    token_ids: Tensor,
    *,
    sample_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Rows:
    """Rows of softmax(logits / temperature) at `head_ids`, differentiable in `logits`.

    logits [N, V]; head_ids [N, K], distinct within a row; token_ids [N]; sample_ids [N, M]. Half
    precision is widened to float32. The tail is a logsumexp over the other logits: 1 - sum would
    lose a small one.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    scaled = scaled / temperature
    head = scaled.gather(1, head_ids)
    tail = _logsumexp(scaled.scatter(1, head_ids, -torch.inf))
    total = torch.logaddexp(tail, _logsumexp(head))
    token = scaled.gather(1, token_ids[:, None]).squeeze(1)
    samples = None if sample_ids is None else scaled.gather(1, sample_ids) - total[:, None]
    return Rows(head - total[:, None], tail - total, token - total, samples)


@torch.no_grad()
def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy [N] in nats of softmax(logits / temperature), logits [N, V]; nothing flows back."""
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    terms: Tensor = torch.special.entr((scaled / temperature).softmax(1))
    return terms.sum(1)


def _logsumexp(values: Tensor) -> Tensor:
    """logsumexp over dim 1; -inf with zero gradient (not NaN) where there is nothing to sum."""
    if values.shape[1] == 0:
        return values.new_full((len(values),), -torch.inf)
    empty = (values == -torch.inf).all(1)
    safe = torch.where(empty[:, None], torch.zeros_like(values), values)
    return torch.where(empty, -torch.inf, safe.logsumexp(1))
