"""The two passes over the logits of a chunk that are not matrix products, in plain PyTorch.

`softmax_triton.py` has the same two functions as Triton kernels; tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Used in place of -inf: exp(-1e4) is 0 even in float64, and -1e4 * 0 is 0 (-inf * 0 is NaN).
_NOTHING = -1e4
# Size of a block of columns: small enough to stay in the CPU cache for all operations on it.
_BLOCK_BYTES = 2 << 20


def tail_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, S, D), each [n], of z = logits / temperature; overwrites `logits` with exp(z - m).

    m = max z (at least the lowest float), S = sum exp(z - m), D = sum (z - m) exp(z - m). `logits`
    [n, V]: -inf for ids that do not count.
    """
    lowest = torch.finfo(logits.dtype).min
    # The maximum of a row of -inf is -inf, and -inf - (-inf) would be NaN.
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


def scaled_exp(
    logits: Tensor, top: Tensor, scale: Tensor, temperature: float, out: Tensor
) -> Tensor:
    """Write row i of exp(z - m), as `tail_statistics` left it, times scale[i] into `out`.

    `logits` [n, V]; `scale` [n]; `out` [n, V], may be `logits`, and is returned. `top` and
    `temperature` are not used; the Triton version needs them.
    """
    return torch.mul(logits, scale[:, None], out=out)
