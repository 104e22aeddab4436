"""Rollouts: the vllm engine against the sampler of transformers, and the seconds of a load.

    .venv-vllm/bin/python -m benchmarks.rollouts.engine [--quick] [--large] [--out FILE]

Random weights in float32, one thread for each engine, groups of 8 sequences with one prompt, k = 64
head ids and 8 draws per token. "equal": every sequence has the maximum length. "ragged": lengths
are geometric with a quarter of the maximum as mean, cut at the maximum. Both engines sample the
same tokens in turn; a speed is the median over the turns. transformers samples all sequences as one
batch, which is its fastest way. A load is compared with reading the snapshot's files and copying
every weight once, in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.vllm_engine import save_tokenizer
from student_trainer.rollout_client.order import Order, SamplingSettings, SequenceRequest

GROUP = 8
PROMPT = 150
SMALL = {"vocab_size": 8192, "hidden_size": 256, "layers": 6}
# The sizes of SmolLM2-135M, with the heads of a Qwen3.
LARGE = {"vocab_size": 49152, "hidden_size": 576, "layers": 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens, one turn, for tests")
    parser.add_argument("--large", action="store_true", help="also a model of 150 million weights")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollout_engine.json"))
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    torch.set_num_threads(1)
    groups, max_tokens, turns = (1, 16, 1) if options.quick else (8, 128, 3)
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread, "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "workload": {"group": GROUP, "prompt": PROMPT, "turns": turns},
        "models": {
            "small": compare_engines(SMALL, groups, max_tokens, turns),
            # A quarter of the tokens.
            **(
                {"large": compare_engines(LARGE, groups // 2, max_tokens // 2, turns)}
                if options.large
                else {}
            ),
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def compare_engines(
    size: dict[str, int], groups: int, max_tokens: int, turns: int
) -> dict[str, Any]:
    from tests.vllm.rollouts import Service, Student

    with tempfile.TemporaryDirectory() as folder:
        student = Student(Path(folder), ends=(), **size)
        save_tokenizer(student.path, size["vocab_size"])
        service = Service(student.path, max_batch_tokens=4096)
        version = student.snapshot()
        service.load(version)
        result: dict[str, Any] = {
            "weights": student.model.num_parameters(),
            "sequences": groups * GROUP,
            "most": max_tokens,
        }
        for shape, limits in make_lengths(groups * GROUP, max_tokens).items():
            order = make_order(version, limits, size["vocab_size"])
            result[shape] = take_turns(
                {
                    "vllm": lambda order=order: service.sample(order)[0],
                    "transformers": lambda order=order: student.written(order),
                },
                sum(limits),
                turns,
            )
        result["load"] = time_loads(service, student, turns)
        service.close()
    return result


def make_lengths(count: int, max_tokens: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(0)
    geometric = torch.empty(count).geometric_(4 / max_tokens, generator=generator).long()
    return {"equal": [max_tokens] * count, "ragged": geometric.clamp(max=max_tokens).tolist()}


def make_order(version: Any, limits: Sequence[int], vocab_size: int) -> Order:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, vocab_size, (len(limits) // GROUP, PROMPT), generator=generator)
    settings = SamplingSettings(
        top_k=64, temperature=1.0, draws=8, seed=0, stream_tokens=max(limits), batch_tokens=1
    )
    return Order(
        version,
        settings,
        [
            SequenceRequest(prompts[number // GROUP], number, limit)
            for number, limit in enumerate(limits)
        ],
    )


def take_turns(methods: dict[str, Callable[[], Any]], tokens: int, turns: int) -> dict[str, Any]:
    """Return tokens per second by method and their ratio: medians, after a warm-up turn."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers: dict[str, Any] = {}
    for turn in range(turns + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            answers[name] = method()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    vllm_answers, transformers_answers = answers["vllm"], answers["transformers"]
    pairs = list(zip(vllm_answers, transformers_answers, strict=True))
    ratios = [b / a for a, b in zip(seconds["vllm"], seconds["transformers"], strict=True)]
    return {
        "tokens_per_second": {
            name: tokens / statistics.median(times) for name, times in seconds.items()
        },
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "same_sequences": sum(torch.equal(a.token_ids, b.token_ids) for a, b in pairs) / len(pairs),
    }


def time_loads(service: Any, student: Any, turns: int) -> dict[str, Any]:
    versions = []
    for _ in range(2):
        student.learn()
        versions.append(student.snapshot())
    copies = {name: torch.empty_like(weight) for name, weight in student.weights().items()}
    load_seconds, copy_seconds = [], []
    for turn in range(2 * turns + 1):
        version = versions[turn % 2]
        began = time.perf_counter()
        service.load(version)
        loaded = time.perf_counter()
        read_and_copy(version.directory, copies)
        if turn:
            load_seconds.append(loaded - began)
            copy_seconds.append(time.perf_counter() - loaded)
    return {
        "bytes": sum(weight.nbytes for weight in copies.values()),
        "seconds": statistics.median(load_seconds),
        "read_and_copy_seconds": statistics.median(copy_seconds),
        "ratio": statistics.median(a / b for a, b in zip(load_seconds, copy_seconds, strict=True)),
    }


def read_and_copy(directory: Path, copies: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load

    for name, weight in load((directory / "model.safetensors").read_bytes()).items():
        copies[name].copy_(weight)


def print_results(result: dict[str, Any]) -> None:
    print(f"{result['workload']}; {result['machine']}")
    for name, model_result in result["models"].items():
        weights, count, max_tokens = (
            model_result["weights"] / 1e6,
            model_result["sequences"],
            model_result["most"],
        )
        print(
            f"\n{name}: {weights:.1f} million weights, {count} sequences of up to"
            f" {max_tokens} tokens"
        )
        for shape in ("equal", "ragged"):
            speeds, ratio = model_result[shape]["tokens_per_second"], model_result[shape]["ratio"]
            print(
                f"{shape:<8} vllm {speeds['vllm']:>7.0f} tokens/s, transformers"
                f" {speeds['transformers']:>7.0f}, ratio {ratio:.2f},"
                f" same sequences {model_result[shape]['same_sequences']:.0%}"
            )
        load = model_result["load"]
        print(
            f"load     {load['seconds']:.3f} s for {load['bytes'] / 1e6:.0f} MB, reading and"
            f" copying {load['read_and_copy_seconds']:.3f} s, ratio {load['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
