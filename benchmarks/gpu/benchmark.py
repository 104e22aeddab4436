"""The fused loss and the teacher's scoring head on a CUDA device, against bounds and peers.

    python -m benchmarks.gpu [--out FILE]           or: make bench-gpu

G1: the loss, forward and backward, in bf16. TF/s counts the three products that any exact loss
needs (6 N V H FLOPs), whatever a method computes. G2: from hidden states to top-k rows, as a
teacher does for every token. G3: selection of the k largest logits, against one read of the logits.
Times are medians by CUDA events. Memory is the caching allocator's peak above inputs and gradients.
The peers are those of `benchmarks/loss/methods.py`; missing packages are reported and skipped.
Writes benchmarks/results/gpu-<device>.json. `--device cpu --quick` runs the same code without a
GPU, at small sizes: its numbers are meaningless.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.methods import GPU_METHODS, Method, find_installed
from benchmarks.loss.problem import make_problem
from benchmarks.shared.meters import CpuMeter, CudaMeter, Meter, measure
from teacher_service.head import scoring
from teacher_service.head.vocabulary import top_ids


@dataclass(frozen=True)
class KernelSizes:
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    vocab: int
    head: int
    scoring_width: int
    selection_rows: int


FULL = KernelSizes((8192, 32_768), (1024, 2048, 4096), 151_936, 64, 4096, 4096)
QUICK = KernelSizes((64, 96), (32,), 1000, 8, 32, 64)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    sizes = QUICK if options.quick else FULL
    meter: Meter = CudaMeter() if options.device == "cuda" else CpuMeter()
    small = make_problem(64, 512, 64, 8, device=options.device, dtype=torch.bfloat16)
    methods, missing = find_installed(GPU_METHODS, small)
    result = {
        "machine": describe_device(options.device),
        "missing": missing,
        "loss": measure_loss(meter, methods, sizes, options.device),
        "scoring": measure_scoring(meter, sizes, options.device),
        "selection": measure_selection(meter, sizes, options.device),
    }
    print_results(result, sizes)
    write_results(result, options, "gpu")


def parse_options(arguments: list[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options `device`, `quick` and `out` of a benchmark that needs a CUDA device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
        sys.exit(2)
    if options.device == "cpu" and not options.quick:
        parser.error("on a CPU only with --quick")
    return options


def write_results(result: dict[str, Any], options: argparse.Namespace, name: str) -> None:
    """Write results to `options.out`; by default, full runs go to a file of name and device."""
    device = re.sub(r"[^a-z0-9]+", "-", result["machine"]["device"].lower()).strip("-")
    out = options.out
    if out is None and not options.quick:
        out = Path(f"benchmarks/results/{name}-{device}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {out}")


def describe_device(device: str) -> dict[str, Any]:
    facts = {"device": "cpu", "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    for package in ("triton", "liger-kernel"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def measure_loss(
    meter: Meter, methods: dict[str, Method], sizes: KernelSizes, device: str
) -> list[dict[str, Any]]:
    """Measure G1."""
    rows = []
    for width in sizes.widths:
        for n in sizes.tokens:
            problem = make_problem(
                n, sizes.vocab, width, sizes.head, device=device, dtype=torch.bfloat16
            )
            for name, run in methods.items():
                timing = measure(
                    meter,
                    lambda run=run, problem=problem: run(problem),
                    clear=problem.clear,
                    count_remaining_bytes=problem.gradient_bytes,
                )
                rows.append({"tokens": n, "width": width, "method": name, **timing})
                _add_flops(rows[-1], 6 * n * sizes.vocab * width)
    return rows


def measure_scoring(meter: Meter, sizes: KernelSizes, device: str) -> list[dict[str, Any]]:
    """Measure G2 for every number of tokens."""
    return [row for n in sizes.tokens for row in _measure_scoring_of(meter, sizes, device, n)]


@torch.no_grad()
def _measure_scoring_of(
    meter: Meter, sizes: KernelSizes, device: str, n: int
) -> list[dict[str, Any]]:
    """Measure G2."""
    problem = make_problem(
        n, sizes.vocab, sizes.scoring_width, sizes.head, device=device, dtype=torch.bfloat16
    )
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    tokens = problem.token_ids

    def score(top_k: int | None, head_ids: torch.Tensor | None) -> object:
        return scoring.score_hidden(
            hidden, weight, token_ids=tokens, top_k=top_k, head_ids=head_ids, temperature=1.0
        )

    def score_materialised() -> object:
        logprobs = (hidden @ weight.T).float().log_softmax(-1)
        return logprobs.topk(sizes.head), logprobs.gather(1, tokens[:, None])

    rows = []
    for name, work in {
        "score_hidden, top-k": lambda: score(sizes.head, None),
        "score_hidden, given ids": lambda: score(None, problem.head_ids),
        "log_softmax + topk": score_materialised,
        "product alone": lambda: hidden @ weight.T,
    }.items():
        rows.append({"tokens": n, "method": name, **measure(meter, work)})
        _add_flops(rows[-1], 2 * n * sizes.vocab * sizes.scoring_width)
    return rows


@torch.no_grad()
def measure_selection(meter: Meter, sizes: KernelSizes, device: str) -> list[dict[str, Any]]:
    """Measure G3 on float32 logits, which is the data type of a teacher's logits."""
    n = sizes.selection_rows
    logits = torch.randn(n, sizes.vocab, device=device)
    rows = []
    for name, work in {
        "read once (amax)": lambda: logits.amax(1),
        "torch.topk": lambda: logits.topk(sizes.head, dim=1),
        "score_hidden's selection": lambda: top_ids(logits, sizes.head),
    }.items():
        timing = measure(meter, work)
        if "ms" in timing:
            timing["us_per_token"] = 1000 * timing["ms"] / n
        rows.append({"method": name, **timing})
    return rows


def _add_flops(row: dict[str, Any], operations: int) -> None:
    if "ms" in row:
        row["tflops"] = operations / row["ms"] / 1e9


def print_results(result: dict[str, Any], sizes: KernelSizes) -> None:
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"V = {sizes.vocab}, k = {sizes.head}, bf16")
    for name, reason in result["missing"].items():
        print(f"left out: {name}: {reason}")
    for width in sizes.widths:
        for n in sizes.tokens:
            rows = [r for r in result["loss"] if (r["width"], r["tokens"]) == (width, n)]
            _print_table(f"G1 loss, N = {n}, H = {width}", rows, "three products")
    for n in sizes.tokens:
        rows = [r for r in result["scoring"] if r["tokens"] == n]
        _print_table(f"G2 scoring, N = {n}, H = {sizes.scoring_width}", rows, "product alone")
    rows = result["selection"]
    _print_table(f"G3 selection, {sizes.selection_rows} rows", rows, "read once (amax)")
    for row in rows:
        if "us_per_token" in row:
            print(f"{row['method']:<50}{row['us_per_token']:>10.3f} us a token")


def _print_table(title: str, rows: list[dict[str, Any]], base: str) -> None:
    """Print a table; `base` names the row that other rows are divided by."""
    print(f"\n{title:<50}{'ms':>10}{'spread':>8}{'x ' + base:>26}{'TF/s':>8}{'peak MiB':>10}")
    (floor,) = (row.get("ms") for row in rows if row["method"] == base)
    for row in rows:
        if "failed" in row:
            print(f"{row['method']:<50}{row['failed']}")
            continue
        ratio = "" if floor is None else f"{row['ms'] / floor:.2f}"
        rate = f"{row['tflops']:.0f}" if "tflops" in row else ""
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        print(
            f"{row['method']:<50}{row['ms']:>10.2f}{row['spread']:>8.2f}{ratio:>26}{rate:>8}{peak:>10}"
        )


if __name__ == "__main__":
    main()
