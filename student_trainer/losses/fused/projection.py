"""Computes the matrix products of a fused loss in chunks: the logits, and the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# A chunk of logits. Each chunk reads and writes the gradient of the whole head in float32: 8 bytes
# per weight of the head, for 6 operations per row and weight. A GPU computes 150 to 320 operations
# in the time of a byte, so 4,096 rows lose about a tenth of the time, and 1,024 rows a third; a CPU
# loses little with 128 rows. These figures are computed (measured: `benchmarks/gpu/ceilings.py`).
_CPU_BYTES, _CPU_MIN_ROWS = 64 << 20, 128
_GPU_MIN_ROWS, _GPU_MAX_ROWS = 1024, 4096
# Of a GPU's memory: float32 logits and their bfloat16 gradient.
_GPU_PART, _LOGIT_BYTES = 32, 4 + 2
_TILE = 128  # rows of a tile of a matrix product


def wide_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of sums, rows and losses.

    It is float64 if `hidden` is float64, otherwise float32.
    """
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of the rows, logits of these rows) for each chunk of rows, in order.

    - hidden [N, H] and weight [V, H]: of the same dtype.
    - bias [V], or None.
    - chunk_rows: rows per chunk; None chooses it by V and by the memory of the device.

    The logits [n, V] are not divided by the temperature. They are float32, or float64 if `hidden`
    is float64. All chunks share one buffer. The caller may overwrite the logits, and must not use
    them after it requests the next chunk.
    """
    dtype = wide_dtype(hidden)
    if chunk_rows is None:
        chunk_rows = count_chunk_rows(
            len(weight), _gpu_bytes(hidden.device), itemsize=dtype.itemsize
        )
    buffer = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight), dtype=dtype)
    for first in range(0, len(hidden), chunk_rows):
        index = slice(first, min(first + chunk_rows, len(hidden)))
        logits = buffer[: index.stop - first]
        if dtype == hidden.dtype:
            torch.mm(hidden[index], weight.T, out=logits)
        elif hidden.is_cuda:
            # cuBLAS writes its float32 sums; rounded to bfloat16, log-probs would be off by 0.01.
            torch.ops.aten.mm.dtype_out(hidden[index], weight.T, dtype, out=logits)
        else:
            logits.copy_(hidden[index] @ weight.T)
        if bias is not None:
            logits += bias
        yield index, logits


def count_chunk_rows(vocabulary: int, gpu_bytes: int | None, *, itemsize: int = 4) -> int:
    """Return the number of rows of a chunk. `clients/plan/memory.py` must use the same formula.

    - vocabulary: the number of logits of a row.
    - gpu_bytes: the memory of the GPU in bytes; None for a CPU.
    - itemsize: bytes of a logit on a CPU.
    """
    if gpu_bytes is None:
        return max(_CPU_MIN_ROWS, _CPU_BYTES // (itemsize * vocabulary))
    rows = gpu_bytes // (_GPU_PART * _LOGIT_BYTES * vocabulary) // _TILE * _TILE
    return max(_GPU_MIN_ROWS, min(_GPU_MAX_ROWS, rows))


def _gpu_bytes(device: torch.device) -> int | None:
    """Return the total memory of a GPU in bytes; None for a CPU.

    The total is the same in each run. The free memory would not be.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


class HeadGradients:
    """The gradients of hidden states, weight and bias, summed over chunks.

    The gradient of an input that needs none is None.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_gradient: Sequence[bool]
    ) -> None:
        """Allocate the sums of the gradients.

        - weight: the model's parameter. Its gradient is summed in float32 and returned in the dtype
          of the weight.
        - needs_gradient: whether hidden states, weight and bias need a gradient, in this order.
        """
        wide = wide_dtype(hidden)
        inputs = hidden, weight, bias
        self._dtypes = [None if value is None else value.dtype for value in inputs]
        self._hidden_gradient = torch.empty_like(hidden) if needs_gradient[0] else None
        self._weight_gradient = torch.zeros_like(weight, dtype=wide) if needs_gradient[1] else None
        self._bias_gradient = (
            torch.zeros_like(bias, dtype=wide) if bias is not None and needs_gradient[2] else None
        )

    def add(self, index: slice, logit_gradients: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add the gradients of one chunk.

        - index: the slice of the N rows that the chunk covers.
        - logit_gradients [n, V]: d(loss)/d(logits) of the chunk.
        - hidden [N, H] and weight [V, H]: as in `logit_chunks`. V may be smaller than the first
          dimension of the weight in `__init__`. The gradient of the remaining rows of the weight is
          then 0.
        """
        count = logit_gradients.shape[1]  # of ids that have logits; the others have no gradient
        if self._bias_gradient is not None:
            self._bias_gradient[:count] += logit_gradients.sum(0, dtype=self._bias_gradient.dtype)
        logit_gradients = logit_gradients.to(hidden.dtype)
        if self._hidden_gradient is not None:
            torch.mm(logit_gradients, weight, out=self._hidden_gradient[index])
        if self._weight_gradient is not None:
            _add_product(self._weight_gradient[:count], logit_gradients.T, hidden[index])

    def scale_by(self, factor: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight and bias. Call this method only once.

        `factor`: a scalar that scales the gradients in place; None does not change them. Each
        gradient has the dtype of its input.
        """
        return [
            None if grad is None else (grad if factor is None else grad.mul_(factor)).to(dtype)
            for grad, dtype in zip(
                (self._hidden_gradient, self._weight_gradient, self._bias_gradient),
                self._dtypes,
                strict=True,
            )
        ]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right in the dtype of `total`."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        # cuBLAS adds the product to the float32 total; no half-precision product is stored.
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right
