"""Both Triton kernels of the loss by block and warps, on one CUDA device.

    python -m benchmarks.gpu.kernels [--out FILE]          or: ./run-gpu ceilings

K1: TB/s of `tail_statistics` (4 bytes per logit) and `scaled_exp` (6) for 1,104 rows of float32
logits and a bf16 gradient, with and without a cap, for each `Launch`; beside a read of the logits
by torch (amax). The fastest launch of each vocabulary is printed last: the launch of
`student_trainer/losses/fused/softmax_triton.py` is to be changed if another is clearly faster.
Writes benchmarks/results/gpu-kernels-<device>.json. `--device cpu --quick` runs plain torch without
a GPU: its numbers are meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.benchmark import describe_device, parse_options, write_results
from benchmarks.shared.meters import CpuMeter, CudaMeter, Meter, measure
from student_trainer.losses.fused import softmax_torch
from student_trainer.losses.fused.logit_map import LogitCurve

ROWS = 1104
VOCABULARIES = (151_936, 151_665, 262_144, 50_257)
BLOCKS, WARPS = (1024, 2048, 4096, 8192), (4, 8, 16)
CURVES = {"no cap": LogitCurve(1.0), "cap": LogitCurve(30.0, 30.0)}


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    meter: Meter = CudaMeter(7, 2) if options.device == "cuda" else CpuMeter()
    result: dict[str, Any] = {"machine": describe_device(options.device), "rows": []}
    rows, vocabularies = (16, (1000,)) if options.quick else (ROWS, VOCABULARIES)
    for vocab in vocabularies:
        logits = torch.randn(rows, vocab, device=options.device)
        for row in measure_vocabulary(meter, logits):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    result["fastest"] = list(find_fastest(result["rows"]))
    for row in result["fastest"]:
        print("fastest", json.dumps(row))
    write_results(result, options, "gpu-kernels")


def measure_vocabulary(meter: Meter, logits: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield the rows of K1 for logits [n, V]."""
    yield _row(meter, "amax", logits, 4, lambda: logits.amax(1))
    for (name, curve), launch in product(CURVES.items(), _list_launches(logits)):
        labels = {"curve": name, **({} if launch is None else vars(launch))}
        for row in _measure_passes(meter, logits, curve, launch):
            yield row | labels


def _measure_passes(
    meter: Meter, logits: torch.Tensor, curve: LogitCurve, launch: Any
) -> Iterator[dict[str, Any]]:
    """Yield the rows of both kernels, or of plain torch, which overwrites what it reads."""
    passes: Any = softmax_torch
    out, options = logits, {}
    if launch is not None:
        from student_trainer.losses.fused import softmax_triton

        passes, options = softmax_triton, {"launch": launch}
        out = torch.empty_like(logits, dtype=torch.bfloat16)
    top, _, _ = passes.tail_statistics(logits, curve, **options)
    scale = torch.ones_like(top)
    for what, logit_bytes, work in (
        ("tail_statistics", 4, lambda: passes.tail_statistics(logits, curve, **options)),
        ("scaled_exp", 6, lambda: passes.scaled_exp(logits, top, scale, curve, out, **options)),
    ):
        yield _row(meter, what, logits, logit_bytes, work)


def _list_launches(logits: torch.Tensor) -> Iterator[Any]:
    if not logits.is_cuda:
        yield None
        return
    from student_trainer.losses.fused.softmax_triton import Launch

    for block, warps in product(BLOCKS, WARPS):
        yield Launch(block, warps)


def _row(
    meter: Meter, what: str, logits: torch.Tensor, logit_bytes: int, work: Any
) -> dict[str, Any]:
    row = {"what": what, "vocab": logits.shape[1], **measure(meter, work)}
    if "ms" in row:
        row["terabytes_per_second"] = logit_bytes * logits.numel() / row["ms"] / 1e9
    return row


def find_fastest(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the row of the fastest launch of each kernel, vocabulary and curve."""
    keys = ("what", "vocab", "curve")
    launched = [row for row in rows if "block" in row and "ms" in row]
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in launched):
        same = [row for row in launched if tuple(row[name] for name in keys) == key]
        yield min(same, key=lambda row: row["ms"])


if __name__ == "__main__":
    main()
