"""The two passes over a chunk's logits that are not matrix products, in plain torch.

The same two functions exist in `softmax_triton.py`; the tests compare them.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp of it is zero in float64 too, and times zero it is zero: -inf would be NaN.
_NOTHING = -1e4
# Columns are taken so many bytes at a time: they stay in the cache for all that is done to them.
_BLOCK_BYTES = 2 << 20


def tail_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """With z = logits / temperature [n, V], -inf where there is nothing: (m, S, D), each [n].

    m = max z (never below the lowest float), S = sum exp(z - m), D = sum (z - m) exp(z - m).
    `logits` become exp(z - m).
    """
    lowest = torch.finfo(logits.dtype).min
    # A row of nothing has a maximum of -inf, which nothing can be subtracted from.
    top = logits.amax(1).div_(temperature).clamp_(min=lowest)
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    columns = max(1, _BLOCK_BYTES // (logits.element_size() * max(1, len(logits))))
    for block in torch.split(logits, columns, 1):
        if temperature != 1:
            block.div_(temperature)
        block.sub_(top[:, None]).clamp_(min=_NOTHING)
        exp = block.exp()
        total += exp.sum(1)
        weighted += block.mul_(exp).sum(1)
        block.copy_(exp)
    return top, total, weighted


def scaled_exp_(logits: Tensor, top: Tensor, scale: Tensor, temperature: float) -> Tensor:
    """What `tail_statistics` left of the logits, as scale[:, None] * exp(z - m), in place."""
    return logits.mul_(scale[:, None])
