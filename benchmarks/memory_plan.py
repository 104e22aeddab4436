"""Measures the memory of real processes, and compares it with the formulas of `distill plan`.

    python -m benchmarks.memory_plan [--only TEXT]

Each process is a real one of a gloo group on the CPU, with a random student. `update` is the
peak of resident memory in an update of two micro-batches, `sampling` that of sampling a batch of
answers, both over the memory before the student was made. Writes
benchmarks/results/memory_plan.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.process_memory import resident_before, resident_peak
from clients.config.common import StudentConfig
from clients.data.model_shape import ModelShape
from clients.preflight.memory import Load, held, learning, optimizer, sampling
from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.model.lora import add_adapters
from student_trainer.model.student import Student
from student_trainer.parallel.sharding import distribute
from student_trainer.rollouts.hf import HuggingFaceRollouts

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SHAPE = ModelShape(8, 256, 768, 4, 2, 64, 4096)
LINE, NEW = 256, 16
SMALL = replace(SHAPE, layers=1, vocabulary=512)


class Ends:
    """A tokenizer without an end token: every answer has all its tokens."""

    eos_token_id = pad_token_id = None


def cases() -> Iterator[tuple[str, Load]]:
    """Yield (architecture, load) of all measurements."""
    for name in MODELS:
        shape = replace(SHAPE, query_norm=name == "qwen3", tied=name == "qwen3")
        base = Load(shape, 1, False, False, False, 2048, LINE, 32, LINE, LINE - NEW, cuda=False)
        for bf16 in (False, True):
            for tokens in (1024, 4096, 8192):
                sampled = 4 * tokens // LINE
                for checkpointing in (False, True):
                    yield name, replace(
                        base,
                        bf16=bf16,
                        tokens=tokens,
                        sampled=sampled,
                        checkpointing=checkpointing,
                    )
            for sharded in (False, True):
                yield name, replace(base, bf16=bf16, processes=2, sharded=sharded)
            yield name, replace(base, bf16=bf16, lora=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only cases with this text in them")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory_plan.json"))
    parser.add_argument("--rank", help="measure this case in this process, one of a group")
    options = parser.parse_args()
    if options.rank is not None:
        case = json.loads(options.rank)
        load = Load(**{**case["load"], "shape": ModelShape(**case["load"]["shape"])})
        print(json.dumps(measure(case["model"], load)))
        return
    found = []
    for name, load in cases():
        if options.only not in label(name, load):
            continue
        measured = group(name, load)
        planned = plan(load)
        found.append({"case": label(name, load), "planned": planned, "measured": measured})
        errors = {stage: planned[stage] / measured[stage] - 1 for stage in planned}
        text = ", ".join(
            f"{stage} {measured[stage] / 2**20:7.1f} MiB {error:+6.1%}"
            for stage, error in errors.items()
        )
        print(f"{label(name, load):52s} {text}", flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def label(name: str, load: Load) -> str:
    """Return the name of a case."""
    sharding = "" if load.processes == 1 else " fsdp2" if load.sharded else " ddp"
    dtype = "bfloat16" if load.bf16 else "float32"
    rest = " checkpointing" * load.checkpointing + " lora" * bool(load.lora)
    return f"{name} {dtype} {load.processes} x {load.tokens}{sharding}{rest}"


def plan(load: Load) -> dict[str, int]:
    """Return the formula of what `measure` measures."""
    own = held(load)
    update = sum(own.values()) + max(sum(of(load).values()) for of in (learning, optimizer))
    return {"update": update, "sampling": sum(own.values()) + sum(sampling(load).values())}


def group(name: str, load: Load) -> dict[str, int]:
    """Run the processes of a case, and return the figures of the first one."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    case = json.dumps({"model": name, "load": asdict(load)})
    running = []
    for rank in range(load.processes):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            # Freed memory goes back to the kernel at once, so that it counts what is in use.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "0",
        }
        if load.processes > 1:
            environment |= {
                "WORLD_SIZE": str(load.processes),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        command = [sys.executable, "-m", "benchmarks.memory_plan", "--rank", case]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed")
    found: dict[str, int] = json.loads(outputs[0].splitlines()[-1])
    return found


def measure(name: str, load: Load) -> dict[str, int]:
    """Measure in this process; collective."""
    accelerator = Accelerator()
    small = replace(load, tokens=2 * LINE, sampled=2, checkpointing=False)
    use(accelerator, name, replace(small, shape=replace(SMALL, query_norm=name == "qwen3")), 0)
    gc.collect()
    return use(accelerator, name, load, resident_before())


def use(accelerator: Accelerator, name: str, load: Load, before: int) -> dict[str, int]:
    """Make a student, update it twice, and sample; return bytes of each stage over `before`."""
    torch.manual_seed(0)
    student = distribute(
        accelerator, Student(model_of(name, load), bf16=load.bf16), "fsdp2" if load.sharded else ""
    )
    learned = [weight for weight in student.trained.parameters() if weight.requires_grad]
    adamw = torch.optim.AdamW(learned, lr=1e-4)
    batch = random_batch(load, accelerator.device)

    def update() -> None:
        for last in (False, True):
            with student.synchronized(last=last):
                out = student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
                accelerator.backward(out.loss_sum)
        adamw.step()
        adamw.zero_grad()

    def sample() -> None:
        rollouts = HuggingFaceRollouts(
            student.full.model,
            Ends(),
            top_k=16,
            temperature=1.0,
            max_new_tokens=NEW,
            batch_tokens=load.sampled * LINE,
            draws=48,
            bf16=load.bf16,
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


def model_of(name: str, load: Load) -> Any:
    """Return a random student of the load's sizes."""
    config, model = MODELS[name]
    shape = load.shape
    made = model(
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
        made = made.to(torch.bfloat16 if load.bf16 else torch.float32)
        rank = {"rank": load.lora, "train_head": load.train_head}
        add_adapters(made, StudentConfig.model_validate({"model": name, "lora": rank}))
    if load.checkpointing:
        enable = getattr(made, "activation_checkpointing_enable", None)
        (enable or made.gradient_checkpointing_enable)({"use_reentrant": False})
    return made


def random_batch(load: Load, device: torch.device) -> Any:
    """Return a micro-batch of `load.tokens` tokens in lines of `load.line`."""
    scored = []
    for _ in range(load.tokens // load.line):
        ids = torch.randint(0, load.shape.vocabulary, (load.line,))
        top = torch.zeros(load.line - 1, 1, dtype=torch.long)
        rollout = Rollout(ids, 1, top, torch.zeros(load.line - 1), False, "")
        scored.append(ScoredSequence(rollout, placeholder_rows(top.int().numpy())))
    return make_batch(scored, device)


if __name__ == "__main__":
    main()
