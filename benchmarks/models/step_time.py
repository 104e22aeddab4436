"""Compares the step-time formulas of `distill plan` with measured updates and sampling on a CPU.

    python -m benchmarks.models.step_time [--out FILE]

Each case is timed between two calibrations of the CPU: a matrix product and a copy, whose rates
replace the figures of a GPU in `clients/plan/step_time.py`. The times are the fastest of several
repetitions, since other programs share the CPU. Writes benchmarks/results/step_time.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from benchmarks.models.memory_plan import Ends, MemoryCase, make_model, random_batch
from clients.config.tables.common import TrainConfig
from clients.data.models.shape import ModelShape
from clients.plan.machines import GpuFigures
from clients.plan.memory import Load
from clients.plan.step_time import sampling_seconds, update_seconds
from student_trainer.data.prompts import Prompt
from student_trainer.loop.optimizer import make_optimizer
from student_trainer.model.student import Student
from student_trainer.parallel.sharding import distribute
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

SMALL = ModelShape(4, 256, 768, 4, 2, 64, 4096)
WIDE = ModelShape(4, 512, 1536, 8, 4, 64, 8192)
ANSWERS, NEW = 8, 24
REPETITIONS = 5


def list_cases() -> Iterator[MemoryCase]:
    """Yield float32 students of different widths, depths, lengths and vocabularies."""
    base = Load(SMALL, 1, False, False, False, 1024, 256, cuda=False)
    for shape in (SMALL, WIDE, replace(SMALL, layers=8), replace(SMALL, vocabulary=16384)):
        for checkpointing in (False, True):
            yield MemoryCase("llama", replace(base, shape=shape, checkpointing=checkpointing))
    yield MemoryCase("llama", replace(base, tokens=2048, line=512))
    yield MemoryCase("llama", replace(base, tokens=512, line=128))
    yield MemoryCase("llama", replace(base, lora=8))
    wide = replace(WIDE, intermediate=3072)
    yield MemoryCase("llama", replace(base, shape=wide))


def fastest_seconds(run: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """Return the fewest processor seconds of this thread, after one run to warm up."""
    run()
    seconds = []
    for _ in range(repetitions):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)


def calibrate() -> GpuFigures:
    """Return the CPU's figures, by one product and one copy."""
    a, b = torch.randn(1024, 512), torch.randn(512, 1024)
    products = 2 * 1024 * 512 * 1024 / fastest_seconds(lambda: a @ b, 7)
    x, y = torch.randn(1 << 24), torch.empty(1 << 24)
    copied = 8 * len(x) / fastest_seconds(lambda: y.copy_(x), 7)
    return GpuFigures(
        products, products, copied, 16, copied, copied, copied,
        product_share=1.0, memory_share=1.0, link_share=1.0, launch=0.0,
    )  # fmt: skip


def mean_machine(machines: list[GpuFigures]) -> GpuFigures:
    """Return the geometric means of the rates of two calibrations."""
    first, second = machines
    products = (first.bf16 * second.bf16) ** 0.5
    memory = (first.memory * second.memory) ** 0.5
    return replace(first, bf16=products, float32=products, memory=memory)


def measure(case: MemoryCase) -> Iterator[tuple[str, float, float, GpuFigures]]:
    """Yield the name, and the predicted and measured seconds, of an update and of sampling."""
    torch.manual_seed(0)
    load = case.load
    accelerator = Accelerator(cpu=True)
    student = distribute(accelerator, Student(make_model(case), bf16=False), "")
    adamw = make_optimizer(TrainConfig(learning_rate=1e-4), student.trained.model)
    batch = random_batch(load, torch.device("cpu"))

    def update() -> None:
        out = student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
        accelerator.backward(out.loss_sum)
        torch.nn.utils.clip_grad_norm_(student.trained.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    before = calibrate()
    seconds = fastest_seconds(update)
    machine = mean_machine([before, calibrate()])
    rows = len(batch)
    yield "update", update_seconds(load, machine, load.tokens, rows, 1), seconds, machine
    if load.checkpointing or load.lora:
        return
    sampler = Sampler(student.full.model, Ends(), top_k=16, temperature=1.0, draws=48, bf16=False)
    rollouts = HuggingFaceRollouts(sampler, max_new_tokens=NEW, batch_tokens=1 << 20)
    prompts = [Prompt(np.arange(load.line - NEW, dtype=np.int32), "")] * ANSWERS

    def sample() -> None:
        list(rollouts.generate(prompts, range(ANSWERS), seed=0))

    student.full.eval()
    before = calibrate()
    seconds = fastest_seconds(sample, 2)
    machine = mean_machine([before, calibrate()])
    predicted = sampling_seconds(load.shape, machine, ANSWERS, load.line, NEW, 4)
    yield "sampling", predicted, seconds, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for case in list_cases():
        shape = case.load.shape
        label = (
            f"{shape.layers} x {shape.hidden}, MLP {shape.intermediate}, {shape.vocabulary} ids,"
            f" {case.load.tokens} tokens of {case.load.line}"
            + ", checkpointing" * bool(case.load.checkpointing)
            + ", lora" * bool(case.load.lora)
        )
        for part, predicted, seconds, machine in measure(case):
            results.append(
                {
                    "case": label,
                    "part": part,
                    "predicted": predicted,
                    "measured": seconds,
                    "ratio": predicted / seconds,
                    "gflops": machine.bf16 / 1e9,
                    "gbytes": machine.memory / 1e9,
                }
            )
            print(json.dumps(results[-1]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
