"""The overhead of the teacher beyond the model's forward pass: scoring head, memory, service.

    python -m benchmarks.models.scoring [--quick] [--out benchmarks/results/scoring.json]

Head: CPU time of the selection of rows (top-k, logsumexp, gather, tail) against the GEMM that
computes the logits, and against log_softmax + topk; minimum of interleaved repetitions on one
thread. Memory: peak of a fresh process above its arguments. Service: tokens per second of
`distill-teacher` through TeacherClient against the same engine called in this process, on the same
batches, in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.scoring_service import compare_with_service
from benchmarks.shared.process_memory import MIB, resident_before, resident_peak
from teacher_service.head.scoring import score_hidden, select
from teacher_service.head.vocabulary import WHOLE

VOCAB, HEAD = 151_936, 64
CHUNK_MIB = 64
WIDTHS = (1024, 2560)  # hidden sizes of a model of 0.6B and of 4B parameters
MEMORY_WIDTH = 64  # the logits are the same; the GEMM is quick
OURS, PLAIN = "ours", "log_softmax + topk"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repetition")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scoring.json"))
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        method, *numbers = options.memory_of
        print(peak_mib(method, *map(int, numbers)))
        return
    vocab = 8192 if options.quick else VOCAB
    with tempfile.TemporaryDirectory() as folder:
        service = compare_with_service(Path(folder), quick=options.quick)
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread a process",
        "vocabulary": vocab,
        "head": HEAD,
        "time": {str(h): measure_times(vocab, h, 2 if options.quick else 7) for h in WIDTHS},
        "memory": measure_memory(vocab, quick=options.quick),
        "service": service,
    }
    result["bounds"] = check_bounds(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


@torch.inference_mode()
def measure_times(vocab: int, width: int, repetitions: int) -> dict[str, float]:
    """Return the CPU milliseconds per token of each step."""
    torch.manual_seed(0)
    rows = CHUNK_MIB * MIB // (4 * vocab)
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width) / width**0.5
    tokens = torch.randint(vocab, (rows,))
    logits = hidden @ weight.t()
    copy = logits.clone()

    def score_plainly() -> None:
        logprobs = (hidden @ weight.t()).log_softmax(-1)
        logprobs.topk(HEAD, -1)
        logprobs.gather(-1, tokens[:, None])

    def score_rows() -> None:
        score_hidden(hidden, weight, token_ids=tokens, top_k=HEAD, head_ids=None, temperature=1.0)

    steps: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.mm(hidden, weight.t(), out=copy),
        "logsumexp": lambda: torch.logsumexp(logits, -1),
        "selection": lambda: list(select(copy, lambda logits: logits, tokens, WHOLE, HEAD, None)),
        OURS: score_rows,
        PLAIN: score_plainly,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions + 1):  # the first round warms up
        for name, step in steps.items():
            copy.copy_(logits)
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {name: 1000 * min(values[1:]) / rows for name, values in seconds.items()}


def measure_memory(vocab: int, *, quick: bool) -> list[dict[str, Any]]:
    """Measure each method in its own process; the plain method only at the smaller size."""
    few, many = (256, 1024) if quick else (2048, 32768)
    peaks = []
    for method, tokens in ((OURS, few), (OURS, many), (PLAIN, few)):
        case = ["--memory-of", method, str(tokens), str(vocab), str(HEAD)]
        command = [sys.executable, "-m", "benchmarks.models.scoring", *case]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append({"method": method, "tokens": tokens, "mib": float(process.stdout)})
    return peaks


@torch.inference_mode()
def peak_mib(method: str, tokens: int, vocab: int, k: int) -> float:
    """Return the peak MiB of this process while it scores, above hidden states and weights."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, MEMORY_WIDTH)
    weight = torch.randn(vocab, MEMORY_WIDTH) / MEMORY_WIDTH**0.5
    ids = torch.randint(vocab, (tokens,))
    # A warm-up, so that one-time allocations of libraries are not counted.
    score_hidden(hidden[:256], weight, token_ids=ids[:256], top_k=k, head_ids=None, temperature=1.0)
    before = resident_before()
    if method == OURS:
        score_hidden(hidden, weight, token_ids=ids, top_k=k, head_ids=None, temperature=1.0)
    else:
        logprobs = (hidden @ weight.t()).log_softmax(-1)
        logprobs.topk(k, -1)
        logprobs.gather(-1, ids[:, None])
    return (resident_peak() - before) / MIB


def declared_mib(tokens: int, k: int) -> float:
    """Return the memory that `score_hidden` documents for a CPU in float32, in MiB."""
    return tokens * (12 * k + 8) / MIB + CHUNK_MIB + 4


def check_bounds(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claims with the measured values."""
    claims = []

    def claim(name: str, measured: float, limit: float, *, at_most: bool = True) -> None:
        met = measured <= limit if at_most else measured >= limit
        requirement = f"{'<=' if at_most else '>='} {limit:g}"
        claims.append({"bound": name, "wanted": requirement, "measured": measured, "met": met})

    for width, row in result["time"].items():
        lse = row["logsumexp"] / row["gemm"]
        claim(f"selection without logsumexp over GEMM, H = {width}", _share(row) - lse, 0.10)
        claim(f"selection with logsumexp over GEMM, H = {width}", _share(row), 0.10)
    many = result["memory"][1]
    declared = declared_mib(many["tokens"], result["head"])
    claim("memory at the most tokens over what is declared", many["mib"] / declared, 1.2)
    claim("tokens a second, service over engine", result["service"]["ratio"], 0.95, at_most=False)
    return claims


def _share(row: dict[str, float]) -> float:
    return row["selection"] / row["gemm"]


def print_results(result: dict[str, Any]) -> None:
    print(f"{result['machine']}; V = {result['vocabulary']}, k = {result['head']}\n")
    print(f"{'CPU ms a token':24}" + "".join(f"{'H = ' + width:>12}" for width in result["time"]))
    for step in next(iter(result["time"].values())):
        print(f"{step:24}" + "".join(f"{row[step]:12.3f}" for row in result["time"].values()))
    print(f"\n{'peak memory':24}{'tokens':>12}{'MiB':>12}")
    for row in result["memory"]:
        print(f"{row['method']:24}{row['tokens']:12}{row['mib']:12.0f}")
    service = result["service"]
    print(f"\nservice: {service['model']}, {service['tokens']} tokens in sequences of")
    print(f"{service['length']}: engine {service['engine']:.0f} tokens/s, through distill-teacher")
    print(f"{service['service']:.0f}, ratio {service['ratio']:.3f}\n")
    for bound in result["bounds"]:
        met = "ok" if bound["met"] else "MISSED"
        print(f"{met:8}{bound['bound']:56}{bound['wanted']:>10}{bound['measured']:10.3f}")


if __name__ == "__main__":
    main()
