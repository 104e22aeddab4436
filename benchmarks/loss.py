"""Time and memory of the fused loss against its bounds and its peers.

    python -m benchmarks.loss [--quick] [--out benchmarks/results/loss.json]

Time: minimum of CPU time over interleaved repetitions on one thread. Memory: peak of a fresh
process above its inputs and parameter gradients. Only ratios are meant to be used.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.loss_methods import METHODS, Problem, fused, make_problem

VOCAB = 151_936
HEAD = 64
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a vocabulary of 16,384, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loss.json"))
    parser.add_argument("--memory-of", nargs=3, metavar=("METHOD", "N", "VOCAB"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        method, n, vocab = options.memory_of
        print(peak_memory(method, int(n), int(vocab)))
        return
    vocab = 16_384 if options.quick else VOCAB
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread",
        "vocabulary": vocab,
        "time": times(vocab, width=896, repetitions=5),
        "k": k_sweep(vocab, repetitions=5),
        "memory": memory(vocab),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def clear(problem: Problem) -> None:
    problem.hidden.grad = problem.weight.grad = None


def times(vocab: int, width: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Seconds of each method at N = 256, K = 64: minimum, and spread (maximum over minimum)."""
    problem = make_problem(256, vocab, width, HEAD)
    return interleaved(
        {name: (lambda run=run: run(problem)) for name, run in METHODS.items()},
        lambda: clear(problem),
        repetitions,
    )


def k_sweep(vocab: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Seconds of the fused loss for k = 32 to 512, at H = 896."""
    problems = {str(k): make_problem(256, vocab, 896, k) for k in (32, 64, 128, 256, 512)}

    def clear_all() -> None:
        for problem in problems.values():
            clear(problem)

    runs = {k: (lambda p=problem: fused(p)) for k, problem in problems.items()}
    return interleaved(runs, clear_all, repetitions)


def interleaved(runs, clear_gradients, repetitions: int) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions + 1):  # the first round warms up
        for name, run in runs.items():
            clear_gradients()
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {
        name: {
            "seconds": min(values[1:]),
            "median": statistics.median(values[1:]),
            "spread": max(values[1:]) / min(values[1:]),
        }
        for name, values in seconds.items()
    }


def memory(vocab: int) -> dict[str, float]:
    """MiB above inputs and gradients at N = 2048, H = 64; the fused loss at other N too."""
    cases = [(name, 2048) for name in METHODS if name != "three products"]
    cases += [("fused", 512), ("fused", 8192)]
    found = {}
    for name, n in cases:
        command = ["--memory-of", name, str(n), str(vocab)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.loss", *command], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name} at N = {n} failed: {done.stderr}")
        found[f"{name}, N = {n}"] = float(done.stdout)
    return found


def peak_memory(method: str, n: int, vocab: int) -> float:
    """MiB that `method` needs at most above its inputs and the gradients it leaves."""
    METHODS[method](make_problem(64, 512, 64, 8))  # libraries' own buffers
    problem = make_problem(n, vocab, 64, HEAD)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not count as still there
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    METHODS[method](problem)
    gradients = sum(t.grad.nbytes for t in (problem.hidden, problem.weight) if t.grad is not None)
    return (status("VmHWM") - before - gradients) / MIB


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def show(result: dict) -> None:
    base = result["time"]["fused"]["seconds"]
    print(f"V = {result['vocabulary']}, N = 256, H = 896, K = {HEAD}; {result['machine']}\n")
    print(f"{'method':<30}{'seconds':>9}{'of fused':>10}{'spread':>8}")
    for name, row in result["time"].items():
        ratio = row["seconds"] / base
        print(f"{name:<30}{row['seconds']:>9.3f}{ratio:>10.3f}{row['spread']:>8.2f}")
    print("\nfused, by k (time over k = 32):")
    first = result["k"]["32"]["seconds"]
    print("  ".join(f"{k}: {row['seconds'] / first:.3f}" for k, row in result["k"].items()))
    print("\npeak MiB above inputs and gradients, N = 2048, H = 64:")
    base = result["memory"]["fused, N = 2048"]
    for name, value in result["memory"].items():
        print(f"{name:<42}{value:>9.0f}{value / base:>9.1f}x")


if __name__ == "__main__":
    main()
