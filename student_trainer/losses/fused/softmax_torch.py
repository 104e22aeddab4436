"""The two passes over the logits of a chunk that are not matrix products, in plain PyTorch.

`softmax_triton.py` has the same two functions as Triton kernels. Tests compare the two modules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.fused.logit_map import LogitCurve

# Used in place of -inf: exp(-1e4) is 0 even in float64, and -1e4 * 0 is 0 (-inf * 0 is NaN).
_LOWEST_EXPONENT = -1e4
# Larger than any product.
_LARGER_THAN_PRODUCTS = 1e30
# Bytes of a block of columns and its buffers: small enough to stay in the CPU cache.
_BLOCK_BYTES = 4 << 20


def tail_statistics(logits: Tensor, curve: LogitCurve) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, S, D), each [n], for z = curve(logits). The function overwrites `logits`.

    - m = max z, at least the lowest float
    - S = sum exp(z - m)
    - D = sum (z - m) exp(z - m)

    `logits` [n, V]: -inf for excluded ids. Each entry is replaced by exp(z - m) times the slope of
    the curve at the entry, divided by the largest slope of the curve.
    """
    lowest = torch.finfo(logits.dtype).min
    # The maximum of a row of -inf is -inf, and -inf - (-inf) would be NaN.
    top = curve(logits.amax(1)).clamp_(min=lowest)
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    # Allocated once: for new buffers, the operating system would clear pages for every block.
    buffer_count = 1 if curve.height is None else 2
    columns = _BLOCK_BYTES // ((1 + buffer_count) * logits.element_size() * max(1, len(logits)))
    columns = min(max(1, columns), logits.shape[1])
    buffers = [logits.new_empty(len(logits), columns) for _ in range(buffer_count)]
    for block in torch.split(logits, columns, 1):
        exp, *flatness = [buffer[:, : block.shape[1]] for buffer in buffers]
        _subtract_top(curve, block, top, exp, *flatness)
        torch.exp(block, out=exp)
        total += exp.sum(1)
        weighted += block.mul_(exp).sum(1)
        if flatness:
            torch.mul(exp, flatness[0], out=block)
        else:
            block.copy_(exp)
    return top, total, weighted


def _subtract_top(
    curve: LogitCurve, block: Tensor, top: Tensor, spare: Tensor, flatness: Tensor | None = None
) -> None:
    """Replace `block` by curve(block) - top.

    `flatness` is set to the slopes of the curve divided by its largest slope. It is None if the
    curve has no height, because all slopes are then equal. `spare` is working memory and is
    overwritten.
    """
    if flatness is None:
        if curve.width != 1:
            block.div_(curve.width)
        block.sub_(top[:, None]).clamp_(min=_LOWEST_EXPONENT)
        return
    # 0 for valid ids, else -inf, which tanh would turn into -1. A comparison would take longer.
    offsets = torch.add(block, _LARGER_THAN_PRODUCTS, out=spare).clamp_(max=0).sub_(top[:, None])
    block.div_(curve.width).tanh_()
    torch.addcmul(block.new_ones(()), block, block, value=-1, out=flatness)
    torch.add(offsets, block, alpha=curve.height, out=block).clamp_(min=_LOWEST_EXPONENT)


def scaled_exp(
    logits: Tensor, top: Tensor, scale: Tensor, curve: LogitCurve, out: Tensor
) -> Tensor:
    """Write row i of `logits`, multiplied by scale[i], into `out`, and return `out`.

    - logits [n, V]: as `tail_statistics` has overwritten it.
    - scale [n]: a factor for each row.
    - out [n, V]: may be `logits`.

    `top` and `curve` are not used here; the Triton function with the same name needs them.
    """
    return torch.mul(logits, scale[:, None], out=out)
