"""The fused loss against its bounds and its peers, on CPU.

    python -m benchmarks.loss [--quick] [--out benchmarks/results/loss.json]

Time: minimum CPU time over interleaved repetitions on one thread. Memory: peak of a fresh process
above its inputs and parameter gradients. Gradients: the fused loss in float32, and autograd in
float32, each against autograd in float64. Only ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.bounds import check_bounds
from benchmarks.loss.methods import METHODS, Method, find_installed, fused, plain
from benchmarks.loss.problem import CPU_CHUNK, Problem, make_problem
from benchmarks.shared.process_memory import MIB, resident_before, resident_peak

HEAD_SIZES = (1, 8, 32, 128, 512)


@dataclass(frozen=True)
class LossSizes:
    """The sizes of the measured problems; k is `head` unless noted."""

    vocab: int
    width: int
    tokens: int
    head: int
    repetitions: int
    memory_tokens: tuple[int, int, int]
    memory_width: int = 64


FULL = LossSizes(151_936, 896, 256, 64, 5, (512, 2048, 8192))
QUICK = LossSizes(4096, 64, 160, 64, 1, (160, 256, 512))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repetition")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loss.json"))
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else FULL
    if options.memory_of:
        method, n, vocab = options.memory_of
        print(peak_memory(method, int(n), int(vocab), sizes))
        return
    methods, missing = find_installed(METHODS, make_problem(64, 512, 64, 8))
    problem = make_problem(sizes.tokens, sizes.vocab, sizes.width, max(HEAD_SIZES))
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread",
        "sizes": asdict(sizes),
        "missing": missing,
        "time": measure_times(problem.with_head(sizes.head), methods, sizes.repetitions),
        "k": sweep_k(problem, sizes.repetitions),
        "memory": measure_memory(methods, sizes, options.quick),
    }
    # The fused loss chooses its chunk: 64 MiB of logits, but at least this many rows.
    result["bounds"] = check_bounds(result, max(64, CPU_CHUNK * sizes.vocab * 4 / MIB))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result, sizes)


def measure_times(
    problem: Problem, methods: dict[str, Method], repetitions: int
) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of each method: minimum, median, and spread (maximum over minimum)."""
    runs = {name: (lambda run=run: run(problem)) for name, run in methods.items()}
    return time_interleaved(runs, problem.clear, repetitions)


def sweep_k(problem: Problem, repetitions: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of the fused loss and the error of its gradients, by k."""
    problems = {str(k): problem.with_head(k) for k in HEAD_SIZES}
    runs = {k: (lambda p=p: fused(p)) for k, p in problems.items()}
    timings = time_interleaved(runs, problem.clear, repetitions)
    small = make_problem(CPU_CHUNK + 32, len(problem.weight), 64, max(HEAD_SIZES))
    return {k: timings[k] | gradient_errors(small.with_head(int(k))) for k in timings}


def gradient_errors(p: Problem) -> dict[str, float]:
    """Return the relative gradient errors of the fused loss and of autograd, both in float32.

    The reference is autograd in float64. The value is the larger one of hidden states and weight.
    """
    exact = p.double()
    plain(exact)
    errors = {}
    for name, run in (("gradient_error", fused), ("autograd_error", plain)):
        p.clear()
        run(p)
        errors[name] = max(
            float(
                (parameter.grad.double() - exact_parameter.grad).norm()
                / exact_parameter.grad.norm()
            )
            for parameter, exact_parameter in ((p.hidden, exact.hidden), (p.weight, exact.weight))
        )
    p.clear()
    return errors


def time_interleaved(
    runs: dict[str, Callable[[], None]], clear: Callable[[], None], repetitions: int
) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions + 1):  # the first round warms up
        for name, run in runs.items():
            clear()
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    clear()
    return {
        name: {
            "seconds": min(values[1:]),
            "median": statistics.median(values[1:]),
            "spread": max(values[1:]) / min(values[1:]),
        }
        for name, values in seconds.items()
    }


def measure_memory(
    methods: dict[str, Method], sizes: LossSizes, quick: bool
) -> list[dict[str, Any]]:
    """Return the peak MiB above inputs and gradients by method, and of "fused" for several N.

    Each value is the median of three separate processes; `all` lists the three. The kernel can
    evict pages at any time, also those of the inputs; their return then looks like a peak.
    """
    few, usual, many = sizes.memory_tokens
    cases = [(name, usual) for name in methods if name != "three products"]
    if quick:
        cases = [("fused", usual)]
    rows = []
    for name, n in [*cases, ("fused", few), ("fused", many)]:
        command = [sys.executable, "-m", "benchmarks.loss", *(["--quick"] if quick else [])]
        case = ["--memory-of", name, str(n), str(sizes.vocab)]
        peaks = []
        for _ in range(1 if quick else 3):
            process = subprocess.run([*command, *case], capture_output=True, text=True)
            if process.returncode:
                raise RuntimeError(f"{name} at N = {n} failed: {process.stderr}")
            peaks.append(float(process.stdout))
        row = {"method": name, "tokens": n, "mib": statistics.median(peaks), "all": peaks}
        rows.append(row)
    return rows


def peak_memory(method: str, n: int, vocab: int, sizes: LossSizes) -> float:
    """Return the peak MiB of `method` above its inputs and the gradients that it leaves."""
    METHODS[method](make_problem(64, 512, 64, 8))  # libraries' own buffers
    problem = make_problem(n, vocab, sizes.memory_width, sizes.head)
    before = resident_before()
    METHODS[method](problem)
    return (resident_peak() - before - problem.gradient_bytes()) / MIB


def print_results(result: dict[str, Any], sizes: LossSizes) -> None:
    base = result["time"]["fused"]["seconds"]
    print(
        f"V = {sizes.vocab}, N = {sizes.tokens}, H = {sizes.width}, k = {sizes.head}; "
        f"{result['machine']}\n\n{'method':<50}{'seconds':>9}{'of fused':>10}{'spread':>8}"
    )
    for name, row in result["time"].items():
        ratio = row["seconds"] / base
        print(f"{name:<50}{row['seconds']:>9.3f}{ratio:>10.3f}{row['spread']:>8.2f}")
    for name, reason in result["missing"].items():
        print(f"{name:<50}{reason:>27}")
    print(f"\n{'k':<6}{'time over k = 32':>17}{'gradient error':>16}{'of autograd':>13}")
    first = result["k"]["32"]["seconds"]
    for k, row in result["k"].items():
        print(
            f"{k:<6}{row['seconds'] / first:>17.3f}{row['gradient_error']:>16.1e}"
            f"{row['autograd_error']:>13.1e}"
        )
    print(f"\npeak above inputs and gradients, H = {sizes.memory_width}{'N':>16}{'MiB':>9}")
    for row in result["memory"]:
        among = f"{min(row['all']):>9.0f} to {max(row['all']):.0f}"
        print(f"{row['method']:<50}{row['tokens']:>6}{row['mib']:>9.0f}{among}")
    print(f"\n{'bound (of the full sizes)':<64}{'wanted':>9}{'measured':>10}")
    for row in result["bounds"]:
        verdict = "" if row["met"] else "  NOT MET"
        print(f"{row['bound']:<64}{row['wanted']:>9}{row['measured']:>10.2f}{verdict}")


if __name__ == "__main__":
    main()
