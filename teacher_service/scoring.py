"""The scoring head that every engine shares: hidden states in, rows out, never a [N, V] tensor
beyond a chunk.

Shapes: N rows, H hidden size, V vocabulary, K head ids a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protos.errors import Corrupt

CHUNK_BYTES = 64 << 20  # of float32 logits


@dataclass(frozen=True)
class ScoredRows:
    """head_ids int64 [N, K]; head_logprobs [N, K], tail_logmass [N] and token_logprobs [N] in
    float32 nats.
    """

    head_ids: Tensor
    head_logprobs: Tensor
    tail_logmass: Tensor
    token_logprobs: Tensor


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    token_ids: Tensor,
    top_k: int | None,
    head_ids: Tensor | None,
    temperature: float,
    chunk_rows: int | None = None,
    first_position: int = 0,
) -> ScoredRows:
    """Rows of log_softmax((hidden @ weight.T + bias) / temperature) over the full vocabulary.

    hidden [N, H], weight [V, H], bias [V], token_ids int64 [N]; either top_k, or head_ids int64 [N,
    K] without duplicates in a row. Raises Corrupt, naming `first_position` + row, where the logits
    have a NaN, a +inf or no finite entry; logits of -inf (masked vocabulary) are fine.
    """
    n, vocab_size = hidden.shape[0], weight.shape[0]
    size = chunk_rows or max(1, CHUNK_BYTES // (4 * vocab_size))
    normalisers: list[Tensor] = []
    chunks: list[ScoredRows] = []
    for first in range(0, n, size):
        rows = slice(first, first + size)
        logits = _logits(hidden[rows], weight, bias).div_(temperature)
        normalisers.append(torch.logsumexp(logits, dim=-1))
        heads = _top(logits, top_k) if head_ids is None else head_ids[rows]
        chunks.append(_score_chunk(logits, normalisers[-1], heads, token_ids[rows]))
    # One look at the end: a check in every chunk would make a GPU wait for each.
    _require_finite(torch.cat(normalisers), first_position)
    return ScoredRows(
        head_ids=torch.cat([chunk.head_ids for chunk in chunks]),
        head_logprobs=torch.cat([chunk.head_logprobs for chunk in chunks]),
        tail_logmass=torch.cat([chunk.tail_logmass for chunk in chunks]),
        token_logprobs=torch.cat([chunk.token_logprobs for chunk in chunks]),
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_cuda and weight.dtype is not torch.float32:
        # Products are accumulated in float32 anyway; rounding them to bf16 on the way out would
        # cost 3 digits.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.t()).float()
    return logits if bias is None else logits.add_(bias)


def _top(logits: Tensor, top_k: int | None) -> Tensor:
    assert top_k is not None, "a query has either top_k or head_ids"
    return logits.topk(top_k, dim=-1).indices


def _score_chunk(logits: Tensor, lse: Tensor, heads: Tensor, token_ids: Tensor) -> ScoredRows:
    head_logprobs = logits.gather(-1, heads) - lse[:, None]
    token_logprobs = logits.gather(-1, token_ids[:, None]).squeeze(-1) - lse
    # Not log(1 - sum): that has no digits left when the tail is small. Nobody needs the head's
    # logits now.
    tail = torch.logsumexp(logits.scatter_(-1, heads, -torch.inf), dim=-1) - lse
    return ScoredRows(heads, head_logprobs, tail, token_logprobs)


def _require_finite(normalisers: Tensor, first_position: int) -> None:
    bad = torch.nonzero(~torch.isfinite(normalisers))
    if len(bad):
        position = first_position + int(bad[0])
        raise Corrupt(
            f"the teacher's logits for position {position} of the sequence are not finite",
            field=f"token_ids[{position}]",
            hint="check the teacher's weights and dtype; float16 overflows where bfloat16 does not",
        )
