"""Heads that scale, cap or leave out logits, against the plain linear head: time and memory.

    python -m benchmarks.loss.heads [--quick] [--out benchmarks/results/heads.json]

The student's fused operator, forward and backward, and the teacher's scoring head. On a CUDA device
(bfloat16, Triton) if there is one, otherwise on one thread of the CPU (float32). Repetitions are
interleaved; a time is the minimum. Memory: peak above inputs and gradients, on a CPU that of a
fresh process.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.benchmark import time_interleaved
from benchmarks.loss.methods import unbiased_kl
from benchmarks.loss.problem import Problem, make_problem
from benchmarks.shared.meters import CudaMeter, measure
from benchmarks.shared.process_memory import MIB, resident_before, resident_peak
from student_trainer.losses import LogitMap, fused_linear_loss
from teacher_service.head.scale_and_cap import ScaleAndCap
from teacher_service.head.scoring import score_hidden

SCALE, CAP = 0.125, 30.0
PADDING = 128  # as in Qwen2.5: 152,064 and 151,936 logits
HEADS = ("plain", "scaled", "capped", "scaled and capped", "without padding")


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of the measured problem."""

    vocab: int
    width: int
    tokens: int
    head: int
    repetitions: int


CPU = HeadSizes(152_064, 896, 256, 64, 7)
CUDA = HeadSizes(152_064, 2048, 8192, 64, 10)
QUICK = HeadSizes(4096, 64, 160, 64, 1)


def logit_map(name: str, vocab: int) -> LogitMap:
    """Return the map of a head of HEADS."""
    return LogitMap(
        vocab - PADDING if name == "without padding" else None,
        SCALE if "scaled" in name else 1.0,
        CAP if "capped" in name else None,
    )


def learn(p: Problem, name: str) -> None:
    """The fused loss, forward and backward."""
    map_of_logits = logit_map(name, len(p.weight))
    loss = unbiased_kl(p)
    fused_linear_loss(
        p.hidden, p.weight, p.head_ids, p.token_ids, loss, logit_map=map_of_logits
    ).loss_sum.backward()


@torch.no_grad()
def score(p: Problem, name: str) -> None:
    """The teacher's head, at the head ids of the problem."""
    map_of_logits = logit_map(name, len(p.weight))
    score_hidden(
        p.teacher_hidden.detach(),
        p.weight.detach()[: map_of_logits.vocab_size],
        scale_and_cap=ScaleAndCap(map_of_logits.scale, map_of_logits.cap),
        token_ids=p.token_ids,
        top_k=None,
        head_ids=p.head_ids,
        temperature=1.0,
    )


WORK: dict[str, Callable[[Problem, str], None]] = {"student": learn, "teacher": score}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, once, no memory, no GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/heads.json"))
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and not options.quick
    sizes = QUICK if options.quick else CUDA if cuda else CPU
    if options.memory_of:
        print(peak_memory(*options.memory_of, sizes))
        return
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, 1 thread"
    measurements = measure_on_cuda(sizes) if cuda else measure_on_cpu(sizes, options.quick)
    result = {
        "machine": f"{machine}, torch {torch.__version__}",
        "sizes": asdict(sizes),
        **{side: add_ratios(rows) for side, rows in measurements.items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def make_padded_problem(sizes: HeadSizes, **options: Any) -> Problem:
    """Return the problem, with all ids below the padding."""
    problem = make_problem(sizes.tokens, sizes.vocab, sizes.width, sizes.head, **options)
    max_id = sizes.vocab - PADDING - sizes.head
    head = problem.head_ids.clamp(max=max_id - 1)
    head = head + (head == max_id - 1) * torch.arange(sizes.head, device=head.device)  # distinct
    return Problem(
        **{**vars(problem), "head_ids": head, "token_ids": problem.token_ids.clamp(max=max_id)}
    )


def measure_on_cuda(sizes: HeadSizes) -> dict[str, dict[str, dict[str, float]]]:
    p = make_padded_problem(sizes, device="cuda", dtype=torch.bfloat16)
    meter = CudaMeter(repetitions=sizes.repetitions)
    measurements: dict[str, dict[str, dict[str, float]]] = {}
    for side, work in WORK.items():
        for name in HEADS:
            row = measure(
                meter,
                lambda work=work, name=name: work(p, name),
                clear=p.clear,
                count_remaining_bytes=p.gradient_bytes,
            )
            measurements.setdefault(side, {})[name] = {
                "seconds": row["ms"] / 1000,
                "mib": row["peak_mib"],
            }
    return measurements


def measure_on_cpu(sizes: HeadSizes, quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    p = make_padded_problem(sizes)
    measurements: dict[str, dict[str, dict[str, float]]] = {}
    for side, work in WORK.items():
        runs = {name: (lambda work=work, name=name: work(p, name)) for name in HEADS}
        measurements[side] = time_interleaved(runs, p.clear, sizes.repetitions)
        for name in HEADS:
            measurements[side][name]["mib"] = 1.0 if quick else measure_memory(side, name)
    return measurements


def measure_memory(side: str, name: str) -> float:
    """Return the least of three fresh processes: the kernel may evict pages of inputs at any time.

    Their return then looks like a peak.
    """
    command = [sys.executable, "-m", "benchmarks.loss.heads", "--memory-of", side, name]
    peaks = []
    for _ in range(3):
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"{side}, {name} failed: {process.stderr}")
        peaks.append(float(process.stdout))
    return min(peaks)


def peak_memory(side: str, name: str, sizes: HeadSizes) -> float:
    """Return the peak MiB above the inputs and the gradients that are left."""
    WORK[side](make_padded_problem(QUICK), name)  # libraries' own buffers
    p = make_padded_problem(sizes)
    before = resident_before()
    WORK[side](p, name)
    return (resident_peak() - before - p.gradient_bytes()) / MIB


def add_ratios(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Add the ratios of each head's time and memory to those of the plain head."""
    plain = rows["plain"]
    for row in rows.values():
        row["time_over_plain"] = row["seconds"] / plain["seconds"]
        row["memory_over_plain"] = row["mib"] / plain["mib"]
    return rows


def print_results(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, {result['sizes']}")
    for side in WORK:
        print(f"\n{side:<20}{'seconds':>9}{'over plain':>12}{'MiB':>9}{'over plain':>12}")
        for name, row in result[side].items():
            print(
                f"{name:<20}{row['seconds']:>9.3f}{row['time_over_plain']:>12.3f}"
                f"{row['mib']:>9.0f}{row['memory_over_plain']:>12.3f}"
            )


if __name__ == "__main__":
    main()
