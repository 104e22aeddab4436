"""Rollouts on one CUDA device: tokens per second, pushes, sleep and wake, and the log-ratio.

    python -m benchmarks.gpu.rollouts [--out FILE]          or: make bench-gpu

R1: answers with our sampler in vLLM's worker (head ids and draws as named), with vLLM's own sampler
and no log-probs, and with transformers' generate, in turn, in tokens per second. R2: a push of all
weights. "write": the trainer's side, from float32 weights on the device to sealed files in memory;
"load": the engine's, from the call to the verified probe; "least": copying as many bytes from the
device to the host and back. R3: seconds of a step of whole jobs: the engine on the trainer's GPU,
asleep while the trainer learns (lag = 0), and beside it (lag = 1); with two GPUs also on one of its
own. R4: sigma, the standard deviation of log p - log mu over the sampled tokens, in nats: p of the
trainer, mu of the engine, equal weights, bfloat16 layers and a float32 head in the engine.

All weights are random; logits have a standard deviation of 3 nats. Writes
benchmarks/results/gpu-rollouts-<device>.json. `--device cpu --quick` runs the same code without a
GPU, at small sizes: its numbers are meaningless, and vLLM frees nothing when it sleeps.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.benchmark import describe_device, parse_options, write_results
from benchmarks.models.vllm_engine import save_tokenizer
from benchmarks.rollouts import ahead as rollouts_ahead
from benchmarks.rollouts.peers import sample_with_generate, sample_with_vllm, start_vllm
from protos.vllm_processes import SHUTDOWN_SECONDS
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.passes import run_passes_over_rollouts
from student_trainer.parallel.sharding import distribute
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_client.weight_channel import (
    FileChannel,
    choose_snapshot_root,
    snapshot_bytes,
)
from student_trainer.rollouts.sampler import SampledTokens

# (head ids, draws): the largest head, and the default of an on-policy job.
RECORDS = ((64, 0), (16, 48))
GROUP = 8  # sequences with the same prompt
SPREAD = 3.0  # standard deviation of the logits, in nats


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class RolloutSizes:
    """models: pushed; the first also samples. share: of the GPU's memory per engine."""

    models: dict[str, Shape]
    vocab: int
    sequences: int
    prompt: int
    tokens: int
    turns: int
    pushes: int
    batch_tokens: int
    share: float
    job: dict[str, int]  # layers, hidden, steps, skipped, answers, tokens


FULL = RolloutSizes(
    {
        "1.5B": Shape(1536, 22, 12, 4, 128, 8960),
        "8B": Shape(4096, 36, 32, 8, 128, 12_288),
    },
    vocab=151_936,
    sequences=256,
    prompt=256,
    tokens=1024,
    turns=3,
    pushes=5,
    batch_tokens=16_384,
    share=0.3,
    job={"layers": 28, "hidden": 1536, "steps": 12, "skipped": 3, "answers": 64, "tokens": 512},
)
QUICK = RolloutSizes(
    {"tiny": Shape(64, 2, 4, 2, 32, 128)},
    vocab=500,
    sequences=GROUP,
    prompt=12,
    tokens=8,
    turns=1,
    pushes=1,
    batch_tokens=256,
    share=0.1,
    job={"layers": 1, "hidden": 256, "steps": 4, "skipped": 1, "answers": 4, "tokens": 8},
)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    sizes = QUICK if options.quick else FULL
    if options.device == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    result: dict[str, Any] = {"machine": describe_device(options.device), "pushes": []}
    for name, shape in sizes.models.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            start_pair(folder, shape, sizes, options.device) as pair,
        ):
            result["pushes"].append({"model": name, **measure_pushes(pair, sizes)})
            print(json.dumps(result["pushes"][-1]), flush=True)
            if len(result["pushes"]) == 1:
                result["sampling"] = {"model": name, **measure_speeds(pair, sizes)}
                result["log_ratio"] = {"model": name, **measure_log_ratio(pair, sizes)}
                print(json.dumps(result["sampling"]), json.dumps(result["log_ratio"]), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    result["steps"] = measure_steps(sizes, options.device)
    print_results(result)
    write_results(result, options, "gpu-rollouts")


class StudentAndEngine:
    """A student of random weights on the device, and an engine that samples with them."""

    def __init__(self, folder: Path, shape: Shape, sizes: RolloutSizes, device: str) -> None:
        from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine

        self.device, self.path = device, folder / "model"
        config = Qwen3Config(
            vocab_size=sizes.vocab,
            hidden_size=shape.width,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=2 * (sizes.prompt + sizes.tokens),
            tie_word_embeddings=False,  # tied random weights repeat the token that was read
            architectures=["Qwen3ForCausalLM"],
            dtype="bfloat16",
        )
        config.save_pretrained(self.path)
        save_tokenizer(self.path, sizes.vocab)
        self.runner = asyncio.Runner()
        # As in a job, the engine first: vLLM measures the free memory when it starts.
        self.engine = VllmRolloutEngine(
            str(self.path),
            dtype="bfloat16",
            gpu_memory_share=sizes.share,
            max_batch_tokens=sizes.batch_tokens,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3ForCausalLM(config).eval()
            # The last norm has states of mean square 1.
            model.lm_head.weight.data.normal_(std=SPREAD / shape.width**0.5)
        self.model = model
        accelerator = make_accelerator(timedelta(hours=1))
        self.student = distribute(accelerator, Student(model, bf16=True), "none")
        self.bytes = snapshot_bytes(model, torch.bfloat16, adapters=False)
        self.root = choose_snapshot_root(folder, 1, 2 * self.bytes, local=True)
        self.channel = FileChannel(
            accelerator,
            self.student,
            self.root,
            job="benchmark",
            attempt=1,
            dtype=torch.bfloat16,
            adapters=False,
            in_flight="drain",
            probe_ids=torch.randint(sizes.vocab, (4, 32)),
            tokens_per_micro_batch=16_384,
        )

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def sample(self, order: Order) -> list[SampledTokens]:
        """Sample an order with the engine."""

        async def collect() -> dict[int, SampledTokens]:
            return {index: answer async for index, answer in self.engine.sample(order)}

        answers = self.runner.run(collect())
        return [answers[index] for index in range(len(order.sequences))]

    def count_sampled_tokens(self, order: Order) -> int:
        """Sample an order; return the number of tokens."""
        return sum(len(answer.token_ids) for answer in self.sample(order))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()
        self.channel.close()


@contextmanager
def start_pair(
    folder: str, shape: Shape, sizes: RolloutSizes, device: str
) -> Iterator[StudentAndEngine]:
    pair = StudentAndEngine(Path(folder), shape, sizes, device)
    try:
        yield pair
    finally:
        pair.close()


def measure_pushes(pair: StudentAndEngine, sizes: RolloutSizes) -> dict[str, Any]:
    """Write and load the weights a few times; return the median seconds, after a warm-up."""
    seconds: dict[str, list[float]] = {"write": [], "load": [], "least": []}
    for number in range(sizes.pushes + 1):
        pair.channel.delete_before(number)
        pair.synchronize()
        times = [time.perf_counter()]
        version = pair.channel.publish(number)
        times.append(time.perf_counter())
        pair.runner.run(pair.engine.load(version))
        times.append(time.perf_counter())
        copy_there_and_back(pair)
        times.append(time.perf_counter())
        for name, began, ended in zip(seconds, times, times[1:], strict=False):
            seconds[name].append(ended - began)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    memory = str(pair.root).startswith("/dev/shm")
    return {"bytes": pair.bytes, "in_memory": memory, **medians}


def copy_there_and_back(pair: StudentAndEngine) -> None:
    """Copy every weight, in bfloat16, from the device to pageable host memory and back."""
    for weight in pair.model.parameters():
        weight.data.bfloat16().cpu().clone().to(pair.device)
    pair.synchronize()


def make_order(pair: StudentAndEngine, sizes: RolloutSizes, top_k: int, draws: int) -> Order:
    settings = SamplingSettings(top_k, 1.0, draws, 0, sizes.tokens, 1)
    requests = [
        SequenceRequest(ids, number, sizes.tokens) for number, ids in enumerate(make_prompts(sizes))
    ]
    version: WeightsVersion = pair.channel.newest
    return Order(version, settings, requests)


def make_prompts(sizes: RolloutSizes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.sequences // GROUP, sizes.prompt)
    return [*torch.randint(sizes.vocab, shape, generator=generator).repeat_interleave(GROUP, 0)]


def measure_speeds(pair: StudentAndEngine, sizes: RolloutSizes) -> dict[str, Any]:
    """Return tokens per second by method, medians over the turns, after a warm-up turn."""
    peer_engine = start_vllm(pair.path, batch_tokens=sizes.batch_tokens, share=sizes.share)
    bfloat16_model = copy.deepcopy(pair.model).bfloat16()
    sampling_prompts, max_tokens = make_prompts(sizes), sizes.tokens
    methods: dict[str, Callable[[], int]] = {
        "vLLM's own": lambda: pair.runner.run(
            sample_with_vllm(peer_engine, sampling_prompts, max_tokens)
        ),
        "transformers' generate": lambda: sample_with_generate(
            bfloat16_model, sampling_prompts, max_tokens
        ),
    }
    for top_k, draws in RECORDS:
        name = f"{top_k} ids, {draws} draws"
        methods[name] = partial(pair.count_sampled_tokens, make_order(pair, sizes, top_k, draws))
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(sizes.turns + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            tokens = method()
            if turn:
                rates[name].append(tokens / (time.perf_counter() - began))
    peer_engine.shutdown(SHUTDOWN_SECONDS)
    return {name: statistics.median(values) for name, values in rates.items()}


def measure_log_ratio(pair: StudentAndEngine, sizes: RolloutSizes) -> dict[str, float]:
    """Return sigma and mean of log p - log mu over the tokens that the engine samples."""
    order = make_order(pair, sizes, 0, 0)
    answers = pair.sample(order)
    rollouts = [
        TokenSequence(torch.cat([request.token_ids, answer.token_ids]), len(request.token_ids))
        for request, answer in zip(order.sequences, answers, strict=True)
    ]
    student = pair.student
    current = run_passes_over_rollouts(
        student,
        rollouts,
        lambda batch: student.rows(batch, 1.0)[1].token_logprobs.float().cpu(),
        tokens_per_micro_batch=16_384,
    )
    recorded = torch.cat([answer.token_logprobs for answer in answers])
    ratio = torch.cat(current).double() - recorded.double()
    return {"sigma": float(ratio.std()), "mean": float(ratio.mean()), "tokens": len(ratio)}


def measure_steps(sizes: RolloutSizes, device: str) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step of whole jobs, and of its stages, by layout."""
    job = dict(sizes.job)
    layouts: dict[str, dict[str, Any]] = {
        "in turn, asleep while the trainer learns": {"engine": "vllm"},
        "one step ahead, on the same GPU": {"engine": "vllm", "lag": 1},
    }
    if device == "cuda" and torch.cuda.device_count() > 1:
        layouts["one step ahead, on another GPU"] = {"engine": "vllm", "lag": 1, "gpus": 1}
    stages_by_layout = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rollouts_ahead.save_material(root, layers=job.pop("layers"), hidden=job.pop("hidden"))
        skipped = job.pop("skipped")
        with rollouts_ahead.serve_teacher(root) as address:
            for number, (name, rollouts) in enumerate(layouts.items()):
                path = root / f"job-{number}"
                lines = rollouts_ahead.run_job(path, address, rollouts=rollouts, threads=1, **job)
                stages_by_layout[name] = rollouts_ahead.median_stages(lines[1 + skipped :])
                print(json.dumps({name: stages_by_layout[name]}), flush=True)
    return stages_by_layout


def print_results(result: dict[str, Any]) -> None:
    """Print the measurements and their targets on a GPU."""
    speed = {name: rate for name, rate in result["sampling"].items() if name != "model"}
    vllm_rate, generate_rate = speed["vLLM's own"], speed["transformers' generate"]
    print(f"\nR1 {result['sampling']['model']}, tokens/s")
    for name, rate in speed.items():
        print(
            f"  {name:<28}{rate:>12.0f}{rate / vllm_rate:>8.2f} x vLLM's own"
            f"{rate / generate_rate:>8.1f} x generate"
        )
    print("  must be, with 64 ids: >= 0.9 x vLLM's own, >= 10 x generate")
    print("\nR2 push, seconds")
    for row in result["pushes"]:
        location = "in memory" if row["in_memory"] else "on disk"
        print(
            f"  {row['model']:<6}{row['bytes'] / 1e9:>8.2f} GB {location}:"
            f" write {row['write']:.2f}, load {row['load']:.2f}, there and back {row['least']:.2f}"
        )
    print("\nR3 seconds a step")
    for name, stages in result["steps"].items():
        parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
        print(f"  {name:<42}{parts}")
    ratio = result["log_ratio"]
    print(
        f"\nR4 sigma of log p - log mu: {ratio['sigma']:.4f} nats a token (must be <= 0.035),"
        f" mean {ratio['mean']:+.5f}, {ratio['tokens']} tokens"
    )


if __name__ == "__main__":
    main()
