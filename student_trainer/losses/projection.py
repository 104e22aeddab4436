"""The matrix products of a fused loss: hidden states to logits, chunk by chunk, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from student_trainer.losses.chunk import reads_narrow

# Of one chunk of logits. Each chunk reads and writes the whole weight gradient, so few rows would
# waste bandwidth; a GPU, whose products are faster against its memory, needs more of them.
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 64 << 20, 640 << 20
_CPU_LEAST_ROWS, _CUDA_LEAST_ROWS = 128, 1024


def wide_dtype(hidden: Tensor) -> torch.dtype:
    """Of sums, rows and losses."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """(index, logits of hidden[index]) with hidden [N, H], weight [V, H] of one dtype.

    All in one buffer, which the caller may overwrite until it asks for the next chunk. Logits are
    float32 at least, unless the passes over them widen what they read.
    """
    dtype = hidden.dtype if reads_narrow(hidden) else wide_dtype(hidden)
    if chunk_rows is None:
        size, least = (
            (_CUDA_CHUNK_BYTES, _CUDA_LEAST_ROWS)
            if hidden.is_cuda
            else (_CPU_CHUNK_BYTES, _CPU_LEAST_ROWS)
        )
        chunk_rows = max(least, size // (dtype.itemsize * len(weight)))
    buffer = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight), dtype=dtype)
    for first in range(0, len(hidden), chunk_rows):
        index = slice(first, min(first + chunk_rows, len(hidden)))
        logits = buffer[: index.stop - first]
        if dtype == hidden.dtype:
            torch.mm(hidden[index], weight.T, out=logits)
        else:
            logits.copy_(hidden[index] @ weight.T)
        if bias is not None:
            logits += bias
        yield index, logits


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed over chunks; None for what needs none."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        """`weight` as the model has it: its gradient is summed in float32 and gets its dtype."""
        wide = wide_dtype(hidden)
        inputs = hidden, weight, bias
        self._dtypes = [None if value is None else value.dtype for value in inputs]
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self._of_bias = (
            torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        )

    def add(self, index: slice, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """One chunk's d(loss)/d(logits) [n, V]; hidden [N, H] and weight as in `logit_chunks`."""
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0, dtype=self._of_bias.dtype)
        of_logits = of_logits.to(hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(of_logits, weight, out=self._of_hidden[index])
        if self._of_weight is not None:
            _add_product(self._of_weight, of_logits.T, hidden[index])

    def times(self, factor: Tensor | None) -> list[Tensor | None]:
        """The sums, scaled in place, each in the dtype of what it is the gradient of."""
        return [
            None if grad is None else (grad if factor is None else grad.mul_(factor)).to(dtype)
            for grad, dtype in zip(
                (self._of_hidden, self._of_weight, self._of_bias), self._dtypes, strict=True
            )
        ]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of `total`."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        # cuBLAS adds while it writes: the product of half precision is never stored by itself.
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right
