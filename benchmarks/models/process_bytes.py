"""Measures the bytes of memory that each process holds for each weight of the student.

    python -m benchmarks.models.process_bytes [--processes 1 2 4 8] [--shardings none fsdp2]
    python -m benchmarks.models.process_bytes --lora 16 --widths 512 1024 --out FILE

Each process is a real one of a gloo group on the CPU, with a random student whose activations are
negligible. The figures are resident memory, as the kernel counts it: the difference between a
student of `--widths` second and one of its first width, divided by the difference between their
numbers of weights. What does not grow with the weights (libraries, compiled kernels, buffers of a
fixed size: 2 to 12 MB) is therefore not in the figures. `held`: after a stage; `peak`: the most
within it. `--lora`: ranks of adapters, 0 for a student whose weights all learn; adapters count as
weights. Writes benchmarks/results/process_bytes.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared.process_memory import resident_before, resident_peak, run_group
from clients.config.tables.common import LoraConfig, StudentConfig, TrainConfig
from clients.data.models.shape import ModelShape
from clients.plan.memory import Load
from clients.plan.memory import resident_bytes as held_bytes
from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import Rollout
from student_trainer.loop.optimizer import make_optimizer
from student_trainer.model.lora import add_adapters
from student_trainer.model.student import Student
from student_trainer.parallel.launcher import is_main_process
from student_trainer.parallel.passes import run_passes
from student_trainer.parallel.sharding import distribute
from student_trainer.teachers.anchor import Anchor

MICRO_BATCHES = 3
VOCABULARY = 4096


def expected_bytes(
    processes: int,
    sharding: str,
    lora: int = 0,
    layers: int = 4,
    widths: Sequence[int] = (256, 512),
) -> dict[str, float]:
    """Return the formula: bytes a weight that a process holds after each stage.

    The gradients (4 bytes, or their share) are freed after an update.
    """
    small, large = (
        Load(
            model_shape(layers, width),
            processes,
            sharding == "fsdp2",
            True,
            False,
            1,
            1,
            anchor=True,
            lora=lora,
        )
        for width in widths
    )
    weights_difference = large.frozen + large.trained - small.frozen - small.trained
    of_small = held_bytes(small)
    parts = {
        name: (large_bytes - of_small[name]) / weights_difference
        for name, large_bytes in held_bytes(large).items()
    }
    of_update = parts["weights"] + parts["optimizer"] + parts["DDP buckets"]
    return {
        "weights": parts["weights"],
        "update": of_update,
        "second update": of_update,
        "scored": of_update,
        "gathered": of_update,
        "anchor": of_update + parts["anchor"],
    }


def model_shape(layers: int, width: int) -> ModelShape:
    """Return the sizes of the student of a width."""
    heads = width // 64
    return ModelShape(
        layers, width, 4 * width, heads, heads, 64, VOCABULARY, tied=True, query_norm=True
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--shardings", nargs="+", default=["none", "fsdp2"])
    parser.add_argument("--lora", type=int, nargs="+", default=[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/process_bytes.json"))
    parser.add_argument("--inside", action="store_true", help="measure in this process of a group")
    options = parser.parse_args(arguments)
    if options.inside:
        figures = measure(options.layers, options.widths[0], options.shardings[0], options.lora[0])
        if is_main_process():
            print(json.dumps(figures))
        return
    results = [
        {
            "processes": processes,
            "sharding": sharding,
            "lora": lora,
            **measure_growth(options, processes, sharding, lora),
        }
        for lora in options.lora
        for processes in options.processes
        for sharding in options.shardings
        if processes > 1 or sharding == "none"
    ]
    for result in results:
        print(
            f"{result['processes']} x {result['sharding']}"
            + (f", adapters of rank {result['lora']}" if result["lora"] else "")
        )
        formula = expected_bytes(
            result["processes"], result["sharding"], result["lora"], options.layers, options.widths
        )
        for stage, (after, peak) in result["stages"].items():
            print(
                f"  {stage:14s} held {after:5.2f} (formula {formula[stage]:5.2f})  peak {peak:5.2f}"
            )
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure_growth(
    options: argparse.Namespace, processes: int, sharding: str, lora: int
) -> dict[str, Any]:
    """Return bytes per weight of each stage, from two students of different size."""
    small, large = (
        measure_group(options, width, processes, sharding, lora) for width in options.widths
    )
    more = large["weights"] - small["weights"]
    stages = {
        name: [(b - a) / more for a, b in zip(small["stages"][name], of_large, strict=True)]
        for name, of_large in large["stages"].items()
    }
    return {"weights": [small["weights"], large["weights"]], "stages": stages}


def measure_group(
    options: argparse.Namespace, width: int, processes: int, sharding: str, lora: int
) -> dict[str, Any]:
    """Run one group, and return the bytes of its first process."""
    inside = ["--inside", "--shardings", sharding, "--lora", str(lora)]
    inside += ["--layers", str(options.layers), "--widths", str(width)]
    printed = list(run_group(processes, "benchmarks.models.process_bytes", inside))
    stage_bytes: dict[str, Any] = json.loads(printed[-1])
    return stage_bytes


def measure(layers: int, width: int, sharding: str, lora: int) -> dict[str, Any]:
    """Measure in this process; collective."""
    accelerator = Accelerator()
    run_stages(accelerator, 1, 64, sharding, lora)  # what torch and gloo need besides
    gc.collect()
    student, stages = run_stages(accelerator, layers, width, sharding, lora, resident_before())
    weights = sum(parameter.numel() for parameter in student.trained.parameters())
    return {"weights": weights, "stages": stages}


def run_stages(
    accelerator: Accelerator, layers: int, width: int, sharding: str, lora: int, before: int = 0
) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Update a student twice, score, gather it, make an anchor; return bytes of each stage."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    stages: dict[str, tuple[int, int]] = {}

    def stage(name: str, run: Callable[[], Any]) -> Any:
        gc.collect()
        resident_before()
        result = run()
        peak = resident_peak()
        gc.collect()
        stages[name] = (resident_before() - before, peak - before)
        return result

    student = stage(
        "weights",
        lambda: distribute(accelerator, Student(random_model(config, lora), bf16=True), sharding),
    )
    optimizer = make_optimizer(TrainConfig(learning_rate=1e-4), student.trained.model)
    batch = small_batch(accelerator.device)

    def update() -> None:
        for number in range(MICRO_BATCHES):
            with student.synchronized(is_last=number == MICRO_BATCHES - 1):
                out = student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
                accelerator.backward(out.loss_sum)
        optimizer.step()
        optimizer.zero_grad()

    stage("update", update)
    stage("second update", update)

    def score_gathered() -> None:
        with student.gathered(), torch.no_grad():
            student.full.rows(batch, 1.0)

    stage(
        "scored",
        lambda: run_passes(
            student, [0], lambda _: batch, lambda micro_batch: student.rows(micro_batch, 1.0)
        ),
    )
    stage("gathered", score_gathered)
    anchor = stage("anchor", lambda: Anchor(student, tau=0.9, update_period=1))
    assert anchor.elements
    return student, stages


def random_model(config: Qwen3Config, lora: int) -> Qwen3ForCausalLM:
    """Return a model of random weights, as `load_model` makes it for a bfloat16 student."""
    if not lora:
        return Qwen3ForCausalLM(config)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    add_adapters(model, StudentConfig(model="random", lora=LoraConfig(rank=lora)))
    return model


def small_batch(device: torch.device) -> Any:
    ids = torch.arange(8)
    head = torch.zeros(4, 1, dtype=torch.int32)
    rollout = Rollout(ids, 4, head, torch.zeros(4), False, "")
    rows = placeholder_rows(head.numpy())
    return make_batch([ScoredSequence(rollout, rows)], device)


if __name__ == "__main__":
    main()
