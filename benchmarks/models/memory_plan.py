"""Measures the memory of real processes, and compares it with the formulas of `distill plan`.

    python -m benchmarks.models.memory_plan [--only TEXT]

Each process is a real one of a gloo group on the CPU, with a random student. `update` is the
peak of resident memory in an update of two micro-batches, `sampling` that of sampling a batch of
answers, both over the memory before the student was made. The percentages are the relative errors
of the formulas. Writes benchmarks/results/memory_plan.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared.pages import format_table
from benchmarks.shared.process_memory import resident_before, resident_peak, run_group
from clients.config.tables.common import StudentConfig, TrainConfig
from clients.data.models.shape import ModelShape
from clients.plan.memory import (
    Load,
    learning_bytes,
    optimizer_bytes,
    resident_bytes,
    sampling_bytes,
)
from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.loop.optimizer import make_optimizer
from student_trainer.model.loading import recompute_activations
from student_trainer.model.lora import add_adapters
from student_trainer.model.student import Student
from student_trainer.parallel.sharding import distribute
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SHAPE = ModelShape(8, 256, 768, 4, 2, 64, 4096)
LINE, NEW = 256, 16


@dataclass(frozen=True)
class MemoryCase:
    """One measurement: the architecture of a student, and the load that decides its memory."""

    model: str
    load: Load

    @property
    def label(self) -> str:
        """The name of the case."""
        load = self.load
        sharding = "" if load.processes == 1 else " fsdp2" if load.sharded else " ddp"
        sharding += " tensor-parallel" * (load.tensor_parallel > 1)
        sharding += " context-parallel" * (load.context_parallel > 1)
        dtype = "bfloat16" if load.bf16 else "float32"
        features = " lora" * bool(load.lora) + " checkpointing" * load.checkpointing
        return f"{self.model} {dtype} {load.processes} x {load.tokens}{sharding}{features}"


class Ends:
    """A tokenizer without an end token: every answer has all its tokens."""

    eos_token_id = pad_token_id = chat_template = None


def list_cases() -> Iterator[MemoryCase]:
    """Yield the cases of all measurements."""
    for name in MODELS:
        shape = replace(SHAPE, query_norm=name == "qwen3", tied=name == "qwen3")
        for bf16 in (False, True):
            base = Load(shape, 1, False, bf16, False, 2048, LINE, 32, LINE, LINE - NEW, cuda=False)
            for tokens in (1024, 2048, 4096, 8192):
                for checkpointing in (False, True):
                    sampled = 4 * tokens // LINE
                    load = replace(base, tokens=tokens, sampled=sampled)
                    yield MemoryCase(name, replace(load, checkpointing=checkpointing))
            yield MemoryCase(name, replace(base, lora=16))
            yield MemoryCase(name, replace(base, lora=16, checkpointing=True))
            for sharded in (False, True):
                yield MemoryCase(name, replace(base, processes=2, sharded=sharded))
            yield MemoryCase(name, replace(base, processes=2, sharded=True, checkpointing=True))
            yield MemoryCase(name, replace(base, processes=2, sharded=True, lora=16))
            group = replace(base, processes=2, sharded=True, tensor_parallel=2)
            for checkpointing in (False, True):
                yield MemoryCase(name, replace(group, checkpointing=checkpointing))
            for size in (2, 4):
                shared = replace(base, processes=size, sharded=True, context_parallel=size)
                for checkpointing in (False, True):
                    yield MemoryCase(
                        name, replace(shared, tokens=4096, checkpointing=checkpointing)
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only cases with this text in them")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory_plan.json"))
    parser.add_argument("--processes", type=int, help="measure in this process, one of a group")
    options = parser.parse_args()
    selected_cases = [case for case in list_cases() if options.only in case.label]
    if options.processes is not None:
        accelerator = Accelerator()
        for case in selected_cases:
            if case.load.processes == options.processes:
                measured = measure(accelerator, case)
                if accelerator.is_main_process:
                    print(json.dumps([case.label, measured]), flush=True)
        return
    results = {}
    for processes in sorted({case.load.processes for case in selected_cases}):
        inside = ["--only", options.only, "--processes", str(processes)]
        for line in run_group(processes, "benchmarks.models.memory_plan", inside):
            name, measured = json.loads(line)
            planned = plan_memory(next(case.load for case in selected_cases if case.label == name))
            results[name] = {"planned": planned, "measured": measured}
            print(format_case(name, planned, measured), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


def format_case(name: str, planned: Mapping[str, int], measured: Mapping[str, int]) -> str:
    """Return a line to print: measured MiB, and the relative error of the plan, by stage."""
    parts = (
        f"{stage} {measured[stage] / 2**20:7.1f} MiB {planned[stage] / measured[stage] - 1:+6.1%}"
        for stage in planned
    )
    return f"{name:42s} {', '.join(parts)}"


def format_errors(results: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Return the table of docs/training.md: the range of relative errors by kind of case."""
    kinds: dict[str, list[Mapping[str, Mapping[str, int]]]] = {}
    for label, bytes_by_source in results.items():
        _, dtype, processes, _, _, *features = label.split()
        plural = "es" if processes != "1" else ""
        kind = ", ".join([dtype, f"{processes} process{plural}", *features])
        kinds.setdefault(kind, []).append(bytes_by_source)
    rows = []
    for kind, cases_of_kind in kinds.items():
        ranges = []
        for stage in ("update", "sampling"):
            errors = [
                case["planned"][stage] / case["measured"][stage] - 1 for case in cases_of_kind
            ]
            ranges.append(f"{min(errors):+.0%} to {max(errors):+.0%}")
        rows.append([kind, str(len(cases_of_kind)), *ranges])
    return format_table(["student", "cases", "update", "sampling"], rows) + "\n"


def plan_memory(load: Load) -> dict[str, int]:
    """Return the formula of what `measure` measures."""
    held_bytes = sum(resident_bytes(load).values())
    update = held_bytes + max(
        sum(stage_bytes(load).values()) for stage_bytes in (learning_bytes, optimizer_bytes)
    )
    return {"update": update, "sampling": held_bytes + sum(sampling_bytes(load).values())}


def measure(accelerator: Accelerator, case: MemoryCase) -> dict[str, int]:
    """Measure in this process; collective.

    The case runs once before: libraries keep buffers from the first one on, whose sizes depend on
    those of the tensors.
    """
    use(accelerator, case, 0)
    gc.collect()
    return use(accelerator, case, resident_before())


def use(accelerator: Accelerator, case: MemoryCase, before: int) -> dict[str, int]:
    """Make a student, update it twice, and sample; return bytes of each stage over `before`."""
    torch.manual_seed(0)
    load = case.load
    student = distribute(
        accelerator,
        Student(make_model(case), bf16=load.bf16),
        "fsdp2" if load.sharded else "",
        load.tensor_parallel,
        load.context_parallel,
    )
    adamw = make_optimizer(TrainConfig(learning_rate=1e-4), student.trained.model)
    batch = random_batch(load, accelerator.device)

    def update() -> None:
        for last in (False, True):
            with student.synchronized(is_last=last):
                out = student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
                accelerator.backward(out.loss_sum)
        adamw.step()
        adamw.zero_grad()

    def sample() -> None:
        rollouts = HuggingFaceRollouts(
            Sampler(
                student.full.model, Ends(), top_k=16, temperature=1.0, draws=48, bf16=load.bf16
            ),
            max_new_tokens=NEW,
            batch_tokens=load.sampled * LINE,
        )
        prompts = [Prompt(np.arange(LINE - NEW, dtype=np.int32), "")] * load.sampled
        with student.gathered():
            student.full.eval()
            list(rollouts.generate(prompts, range(load.sampled), seed=0))
            student.full.train()

    update()
    return {"update": stage(update) - before, "sampling": stage(sample) - before}


def stage(run: Callable[[], None]) -> int:
    """Return the peak of resident memory while `run` runs."""
    gc.collect()
    resident_before()
    run()
    return resident_peak()


def make_model(case: MemoryCase) -> Any:
    """Return a random student of the load's sizes."""
    config, model = MODELS[case.model]
    load, shape = case.load, case.load.shape
    random_model = model(
        config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
        )
    )
    if load.lora:
        random_model = random_model.to(torch.bfloat16 if load.bf16 else torch.float32)
        rank = {"rank": load.lora, "train_head": load.train_head}
        add_adapters(
            random_model, StudentConfig.model_validate({"model": case.model, "lora": rank})
        )
    recompute_activations(random_model, load.checkpointing)
    return random_model


def random_batch(load: Load, device: torch.device) -> Any:
    """Return a micro-batch of `load.tokens` tokens in lines of `load.line`."""
    scored = []
    for _ in range(load.tokens // load.line):
        ids = torch.randint(0, load.shape.vocabulary, (load.line,))
        top = torch.zeros(load.line - 1, 1, dtype=torch.int32)
        rollout = Rollout(ids, 1, top, torch.zeros(load.line - 1), False, "")
        scored.append(ScoredSequence(rollout, placeholder_rows(top.numpy())))
    return make_batch(scored, device)


if __name__ == "__main__":
    main()
