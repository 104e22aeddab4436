# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The two passes over the logits of a chunk that are not matrix products, as Triton kernels.

The first pass only reads the logits; in `softmax_torch.py` it overwrites them. The second pass
reads the logits and writes the gradient in the dtype of the next matrix product. The memory traffic
per float32 logit and bf16 gradient is 4 + 4 + 2 bytes. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from student_trainer.losses.fused.logit_map import LogitCurve


@dataclass(frozen=True)
class Launch:
    """The launch parameters of a kernel: logits per block, and warps (32 threads) per block."""

    block: int = 4096
    warps: int = 4

    @property
    def options(self) -> dict[str, Any]:
        """The launch options for Triton, except the constants of the kernel.

        They let Triton fuse multiplications and additions, which was the default before Triton
        3.10.
        """
        return {"num_warps": self.warps, "enable_fp_fusion": True}


# The same for each vocabulary: no GPU has measured others (`python -m benchmarks.gpu.kernels`).
LAUNCH = Launch()


def tail_statistics(
    logits: Tensor, curve: LogitCurve, launch: Launch = LAUNCH
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, S, D) as `softmax_torch.tail_statistics` does, in float32.

    This function does not overwrite `logits` [n, V].
    """
    rows, columns = logits.shape
    top, total, weighted = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    with torch.cuda.device_of(logits):  # Triton launches on the current CUDA device
        _statistics[(rows,)](
            logits, top, total, weighted, logits.stride(0), columns, *_curve_arguments(curve),
            CAPPED=curve.height is not None, BLOCK=launch.block, **launch.options,
        )  # fmt: skip
    return top, total, weighted


def scaled_exp(
    logits: Tensor,
    top: Tensor,
    scale: Tensor,
    curve: LogitCurve,
    out: Tensor,
    launch: Launch = LAUNCH,
) -> Tensor:
    """Write scale[:, None] * exp(z - top[:, None]) into `out`, and return it; z = curve(logits).

    - logits [n, V].
    - top and scale: [n] float32.
    - out [n, V]: may be `logits`.

    With a cap, each entry is also multiplied by the slope of the curve divided by its largest
    slope.
    """
    rows, columns = logits.shape
    grid = (rows, triton.cdiv(columns, launch.block))
    with torch.cuda.device_of(logits):
        _scaled_exp[grid](
            logits, out, top, scale.contiguous(), logits.stride(0), out.stride(0), columns,
            *_curve_arguments(curve), CAPPED=curve.height is not None, BLOCK=launch.block,
            **launch.options,
        )  # fmt: skip
    return out


def _curve_arguments(curve: LogitCurve) -> tuple[float, float]:
    return float(curve.width), float(curve.height or 0)


@triton.jit
def _tanh(x):
    # (1 - t) / (1 + t) loses digits near 0, where a continued fraction has an error of 3e-10.
    t = tl.exp(-2 * tl.abs(x))
    far = (1 - t) / (1 + t)
    near = tl.minimum(tl.abs(x), 0.5)
    square = near * near
    near = near * (945 + square * (105 + square)) / (945 + square * (420 + 15 * square))
    size = tl.where(tl.abs(x) < 0.5, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def _statistics(
    logits, top_out, total_out, weighted_out, stride, columns, width, height,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: rows times columns of a chunk can exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # Each lane has its own maximum and sums, so that the loop needs no reduction over lanes.
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + lanes < columns
        z = tl.load(logits + row * stride + first + lanes, mask=inside, other=-float("inf"))
        z = z.to(tl.float32) / width
        if CAPPED:  # an id that does not count stays -inf
            z = tl.where(z == -float("inf"), z, height * _tanh(z))
        # Clamp to a finite value, since 0 * -inf is NaN; its exp is 0 too.
        z = tl.maximum(z, -3.0e38)
        higher = tl.maximum(top, z)
        shrink = tl.exp(top - higher)
        exp = tl.exp(z - higher)
        # sum (z - m) e^(z - m) when m grows by d: shrink * (weighted - d * total).
        weighted = shrink * (weighted + tl.maximum(top - higher, -1.0e4) * total)
        weighted += tl.maximum(z - higher, -1.0e4) * exp
        total = shrink * total + exp
        top = higher
    # A lane that read only -inf has summed exp(0) for the clamped value; discard it.
    total = tl.where(top > -3.0e38, total, 0.0)
    weighted = tl.where(top > -3.0e38, weighted, 0.0)
    row_top = tl.max(top, 0)
    behind = tl.maximum(top - row_top, -1.0e4)
    shrink = tl.exp(behind)
    tl.store(top_out + row, row_top)
    tl.store(total_out + row, tl.sum(shrink * total, 0))
    tl.store(weighted_out + row, tl.sum(shrink * (weighted + behind * total), 0))


@triton.jit
def _scaled_exp(
    logits, out, top, scale, stride, out_stride, columns, width, height,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < columns
    z = tl.load(logits + row * stride + lanes, mask=inside, other=-float("inf")).to(tl.float32)
    z = z / width
    factor = tl.load(scale + row)
    if CAPPED:
        capped = _tanh(z)
        factor = factor * (1 - capped * capped)
        z = tl.where(z == -float("inf"), z, height * capped)
    value = factor * tl.exp(z - tl.load(top + row))
    tl.store(out + row * out_stride + lanes, value.to(out.dtype.element_ty), mask=inside)
