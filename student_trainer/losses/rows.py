"""Rows: the values of a distribution over the vocabulary that a loss reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Selects rows of a batch: a slice, or row numbers [n] int64.
Index = slice | Tensor
# The lowest log-prob that a loss uses; also the lowest that float16 rows can hold. A probability of
# exactly zero (a masked token) counts as this value, so that an infinite KL becomes a large number
# with a finite gradient, and 0 log 0 is 0.
LOWEST_LOGPROB = -65504.0
# The highest log of a ratio q/p that a loss uses. A higher value means p(y) < e^-40, which no
# sampler draws in practice; from about 44 on, the norm of a float32 gradient overflows: e^88 is
# infinite.
HIGHEST_LOG_RATIO = 40.0


@dataclass(frozen=True)
class Rows:
    """Log-probs of N distributions over the full vocabulary, in nats.

    - head_logprobs [N, K]: log-probs of the head ids.
    - tail_logmass [N]: log of the tail mass, the total probability of the other ids; -inf if the
      head is the whole vocabulary.
    - token_logprobs [N]: log-probs of the actual tokens.
    - sample_logprobs [N, M]: log-probs of ids that were drawn from the tail, by the teacher (tail
      samples) or by the student (draws); None without drawn ids. For tail samples, the rows of the
      teacher itself may hold only their mean, [N, 1].
    """

    head_logprobs: Tensor
    tail_logmass: Tensor
    token_logprobs: Tensor
    sample_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tail_logmass)

    def detach(self) -> Rows:
        """Return the rows, detached from the autograd graph."""
        return self.map(Tensor.detach)

    def __getitem__(self, index: Index) -> Rows:
        return self.map(lambda values: values[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Return rows in which each tensor is replaced by change(tensor)."""
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
    """Return the rows of softmax(logits / temperature) at `head_ids`, differentiable in `logits`.

    - logits [N, V]: half precision is converted to float32.
    - head_ids [N, K] int64: distinct within a row.
    - token_ids [N] int64.
    - sample_ids [N, M] int64.

    The tail mass is a logsumexp over the other logits, because 1 - (sum of the head) loses a small
    tail mass. `fused_linear_rows` computes the same without [N, V] logits.
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
    """Return the entropy [N] in nats of softmax(logits / temperature), without a gradient.

    logits [N, V]: half precision is converted to float32.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    terms: Tensor = torch.special.entr((scaled / temperature).softmax(1))
    return terms.sum(1)


def index_equal_ids(ids: Tensor) -> Tensor:
    """Return an index in [0, M) for each id of `ids` [N, M].

    Within a row, equal ids have equal indices, and different ids have different indices.
    """
    ids = ids.contiguous()
    return torch.searchsorted(ids.sort(1).values, ids)


def _logsumexp(values: Tensor) -> Tensor:
    """Return the logsumexp over dim 1.

    A row without finite values gives -inf with a gradient of zero, instead of NaN.
    """
    if values.shape[1] == 0:
        return values.new_full((len(values),), -torch.inf)
    empty = (values == -torch.inf).all(1)
    safe = torch.where(empty[:, None], torch.zeros_like(values), values)
    return torch.where(empty, -torch.inf, safe.logsumexp(1))
