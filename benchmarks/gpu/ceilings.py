"""What one CUDA device reaches: copies, matrix products, and those of the head by rows per chunk.

    python -m benchmarks.gpu.ceilings [--out FILE]          or: ./run-gpu ceilings

C1: a copy in device memory, and a product of square bf16 matrices. C2: the three products of the
head for one chunk of rows, as the fused loss runs them: logits in float32, gradients of hidden
states in bf16, gradients of the weight added in float32. C3: the fused loss over 8,192 rows with
so many rows per chunk; TF/s counts the three products. C2 and C3 test the rows per chunk of
`student_trainer/losses/fused/projection.py`. Writes benchmarks/results/gpu-ceilings-<device>.json
after each part.
`--device cpu --quick` runs the same code without a GPU: its numbers are meaningless.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.benchmark import describe_device, parse_options, write_results
from benchmarks.loss.methods import unbiased_kl
from benchmarks.loss.problem import make_problem
from benchmarks.shared.meters import CpuMeter, CudaMeter, Meter, Work, measure
from student_trainer.losses import fused_linear_loss


@dataclass(frozen=True)
class CeilingSizes:
    copied: int
    square: int
    vocabularies: tuple[int, ...]
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: int


FULL = CeilingSizes(
    2**30, 8192, (151_936, 151_665), (896, 1536, 2560, 4096), (1024, 1104, 2048, 4096), 8192
)
QUICK = CeilingSizes(2**16, 128, (1000,), (32,), (16, 32), 64)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    sizes = QUICK if options.quick else FULL
    meter: Meter = CudaMeter(7, 2) if options.device == "cuda" else CpuMeter()
    result: dict[str, Any] = {"machine": describe_device(options.device), "rows": []}
    for part in (measure_device, measure_head_products, measure_chunks):
        for row in part(meter, sizes, options.device):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
        write_results(result, options, "gpu-ceilings")
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def measure_device(meter: Meter, sizes: CeilingSizes, device: str) -> Iterator[dict[str, Any]]:
    """C1."""
    source, target = (torch.zeros(sizes.copied, device=device) for _ in range(2))
    copy = {"what": "copy", **measure(meter, lambda: target.copy_(source))}
    yield _with_rate(copy, "terabytes_per_second", 8 * sizes.copied)
    side = sizes.square
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = {"what": f"product of {side} x {side}", **measure(meter, lambda: left @ right)}
    yield _with_rate(product, "teraflops", 2 * side**3)


def measure_head_products(
    meter: Meter, sizes: CeilingSizes, device: str
) -> Iterator[dict[str, Any]]:
    """C2."""
    for vocab in sizes.vocabularies:
        for width in sizes.widths:
            weight = torch.randn(vocab, width, device=device).bfloat16()
            weight_gradient = torch.zeros(vocab, width, device=device)
            for rows in sizes.rows:
                for name, work in _head_products(rows, weight, weight_gradient).items():
                    row = {"what": name, "vocab": vocab, "width": width, "rows": rows}
                    row |= measure(meter, work)
                    yield _with_rate(row, "teraflops", 2 * rows * vocab * width)


def _head_products(
    rows: int, weight: torch.Tensor, weight_gradient: torch.Tensor
) -> dict[str, Work]:
    (vocab, width), device = weight.shape, weight.device
    hidden = torch.randn(rows, width, device=device).bfloat16()
    logits = torch.empty(rows, vocab, device=device)
    gradient = torch.randn(rows, vocab, device=device).bfloat16()
    hidden_gradient = torch.empty_like(hidden)
    mm, addmm = torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out

    def add_weight_gradient() -> None:
        addmm(weight_gradient, gradient.T, hidden, torch.float32, out=weight_gradient)

    if device.type == "cpu":  # has no products of another dtype
        return {"gradient of hidden states": lambda: torch.mm(gradient, weight)}
    return {
        "logits": lambda: mm(hidden, weight.T, torch.float32, out=logits),
        "gradient of hidden states": lambda: torch.mm(gradient, weight, out=hidden_gradient),
        "gradient of the weight": add_weight_gradient,
    }


def measure_chunks(meter: Meter, sizes: CeilingSizes, device: str) -> Iterator[dict[str, Any]]:
    """C3. `rows`: 0 for the operator's own choice."""
    vocab, count = sizes.vocabularies[0], sizes.tokens
    for width in sizes.widths:
        problem = make_problem(count, vocab, width, 64, device=device, dtype=torch.bfloat16)
        inputs = (problem.hidden, problem.weight, problem.head_ids, problem.token_ids)
        loss_fn = unbiased_kl(problem)
        for rows in (0, *sizes.rows, count):

            def run(rows: int = rows, inputs: Any = inputs, loss_fn: Any = loss_fn) -> None:
                fused_linear_loss(*inputs, loss_fn, chunk_rows=rows or None).loss_sum.backward()

            row: dict[str, Any] = {"what": "fused loss", "width": width, "rows": rows}
            row |= measure(
                meter, run, clear=problem.clear, count_remaining_bytes=problem.gradient_bytes
            )
            yield _with_rate(row, "teraflops", 6 * count * vocab * width)


def _with_rate(row: dict[str, Any], name: str, amount: int) -> dict[str, Any]:
    """Add the amount per second, in 1e12."""
    return row | ({name: amount / row["ms"] / 1e9} if "ms" in row else {})


if __name__ == "__main__":
    main()
