"""Updates of a student on one CUDA device: tokens per second, MFU and memory, against TRL's.

    python -m benchmarks.gpu.training [--out FILE]          or: make bench-gpu

An update is forward, backward, clipping and AdamW over 64 sequences of 1,024 tokens, in four
micro-batches, of students with random weights in the shape of Qwen3-0.6B and Qwen3-4B. The losses
are the default Top-k KL (16 head ids, 48 draws), also with compiled layers and other optimizers,
and the cross-entropy of fine-tuning; the peer is TRL's SFTTrainer with the same model, sequences,
micro-batches and precision. The peak memory is beside that of `distill plan`. MFU counts the
operations of `student_trainer/loop/efficiency.py`, for all alike. Writes
benchmarks/results/gpu-training-<device>.json. `--device cpu --quick` runs the same code without a
GPU, at small sizes: its numbers are meaningless.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.benchmark import describe_device, parse_options, write_results
from clients.config.tables.common import StudentConfig, TrainConfig
from clients.data.models.shape import ModelShape
from clients.plan.memory import Load, peak_bytes
from protos.rows.codec import RowBlock
from student_trainer.data.batch import ScoredSequence, placeholder_rows
from student_trainer.data.packing import micro_batches
from student_trainer.data.sequence import Rollout, TailDraws, TokenSequence
from student_trainer.loop.efficiency import LearningFlops, peak_flops
from student_trainer.loop.optimizer import clip_gradients, make_optimizer
from student_trainer.loop.step import Objective
from student_trainer.model.loading import recompute_activations
from student_trainer.model.student import Student, compile_layers
from student_trainer.objectives.cross_entropy import CrossEntropyObjective
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.parallel.sharding import distribute

HEAD, DRAWS = 16, 48


@dataclass(frozen=True)
class UpdateCase:
    """One line of the table.

    recompute, compile, optimizer, cpu_offload: the values of `student.gradient_checkpointing`,
    `student.compile`, `train.optimizer` and `train.cpu_offload`. The optimizer "foreach" is
    PyTorch's default on a GPU.
    """

    model: str
    method: str
    recompute: bool | str
    compile: bool = False
    optimizer: str = "adamw"
    cpu_offload: bool = False


@dataclass(frozen=True)
class UpdateSizes:
    vocab: int
    length: int
    prompt: int
    sequences: int
    micro_batch: int
    updates: int
    models: dict[str, tuple[int, int, int, int]]  # width, layers, heads, intermediate


FULL = UpdateSizes(
    151_936,
    1024,
    256,
    64,
    16_384,
    5,
    {"0.6B": (1024, 28, 16, 3072), "4B": (2560, 36, 32, 9728)},
)
QUICK = UpdateSizes(200, 24, 8, 4, 48, 1, {"tiny": (32, 2, 2, 64)})


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments, __doc__)
    sizes = QUICK if options.quick else FULL
    result: dict[str, Any] = {"machine": describe_device(options.device), "cases": []}
    for case in list_cases(sizes):
        row = {**asdict(case), **measure_case(case, sizes, options.device)}
        result["cases"].append(row)
        print(json.dumps(row), flush=True)
    write_results(result, options, "gpu-training")


def list_cases(sizes: UpdateSizes) -> Iterator[UpdateCase]:
    for model in sizes.models:
        for recompute in (False, "selective", True):
            yield UpdateCase(model, "Top-k KL", recompute)
            yield UpdateCase(model, "Top-k KL", recompute, compile=True)
        for optimizer in ("foreach", "adamw_8bit"):
            yield UpdateCase(model, "Top-k KL", True, optimizer=optimizer)
        yield UpdateCase(model, "Top-k KL", True, cpu_offload=True)
        for method in ("cross-entropy", "TRL SFTTrainer"):
            for recompute in (False, True):
                yield UpdateCase(model, method, recompute)


def measure_case(case: UpdateCase, sizes: UpdateSizes, device: str) -> dict[str, Any]:
    """Return tokens per second, MFU and memory of a case; {failed: reason} if it does not run."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    run = time_trl_updates if case.method == "TRL SFTTrainer" else time_our_updates
    try:
        seconds, operations = run(case, sizes, device)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed"}
    median = statistics.median(seconds)
    row: dict[str, Any] = {
        "seconds": median,
        "spread": max(seconds) / min(seconds),
        "tokens_per_second": sizes.sequences * sizes.length / median,
    }
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    if (peak := peak_flops(name, bf16=True)) is not None:
        row["mfu"] = operations / median / peak
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if case.method != "TRL SFTTrainer":
            row["planned_gib"] = plan_bytes(case, sizes) / 2**30
    return row


def plan_bytes(case: UpdateCase, sizes: UpdateSizes) -> int:
    """Return the peak bytes of a case by the formulas of `distill plan`, in eager mode."""
    width, layers, heads, intermediate = sizes.models[case.model]
    shape = ModelShape(
        layers, width, intermediate, heads, max(1, heads // 4), 128, sizes.vocab,
        tied=True, query_norm=True,
    )  # fmt: skip
    return peak_bytes(
        Load(
            shape,
            processes=1,
            sharded=case.cpu_offload,
            bf16=True,
            checkpointing=case.recompute,
            tokens=sizes.micro_batch,
            line=sizes.length,
            narrow_moments=case.optimizer == "adamw_8bit",
            cpu_offload=case.cpu_offload,
            gpu_bytes=torch.cuda.get_device_properties(0).total_memory,
        )
    )


def make_random_model(case: UpdateCase, sizes: UpdateSizes, device: str) -> Any:
    width, layers, heads, intermediate = sizes.models[case.model]
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        return Qwen3ForCausalLM(config)


def time_our_updates(
    case: UpdateCase, sizes: UpdateSizes, device: str
) -> tuple[list[float], float]:
    """Run the trainer's update; return the seconds of each, and the operations of one."""
    if case.cpu_offload:
        accelerator = make_accelerator(timedelta(minutes=10), cpu_offload=True)
    else:
        accelerator = Accelerator(cpu=device == "cpu")
    model = make_random_model(case, sizes, "cpu" if case.cpu_offload else device).train()
    recompute_activations(model, case.recompute)
    sharding = "fsdp2" if case.cpu_offload else "none"
    local_student = Student(model, bf16=True)
    student = distribute(accelerator, local_student, sharding, cpu_offload=case.cpu_offload)
    student.choose_attention(StudentConfig(model=case.model))
    layout = student.trained.layout
    if case.compile:
        compile_layers(student.trained)
    optimizer = make_case_optimizer(case, model)
    scored: list[ScoredSequence] = []
    objective: Objective
    if case.method == "Top-k KL":
        objective = DistillationObjective("reverse", "bucket+draws", 1.0)
        scored = [make_rollout(sizes, number) for number in range(sizes.sequences)]
    else:
        objective = CrossEntropyObjective()
        scored = [make_example(sizes, number) for number in range(sizes.sequences)]
    groups = micro_batches(scored, sizes.micro_batch, layout)
    rows = sum(scored_sequence.sequence.learned for scored_sequence in scored)

    def update() -> None:
        for group in groups:
            batch = objective.batch(group, accelerator.device, layout)
            out = student(batch, objective.loss(batch), 1.0, objective.needs_all_rows)
            (out.loss_sum / rows).backward()
            objective.metrics(batch, out)
        clip_gradients(student, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    flops = LearningFlops(student.trained)
    operations = sum(
        flops.count_sequence(sizes.length, scored_sequence.sequence.learned)
        for scored_sequence in scored
    )
    seconds = time_updates(update, sizes.updates, device)
    if case.cpu_offload:
        torch.distributed.destroy_process_group()
    return seconds, operations


def make_case_optimizer(case: UpdateCase, model: Any) -> torch.optim.Optimizer:
    if case.optimizer == "foreach":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    settings = TrainConfig.model_validate({"optimizer": case.optimizer, "learning_rate": 1e-5})
    return make_optimizer(settings, model)


def time_trl_updates(
    case: UpdateCase, sizes: UpdateSizes, device: str
) -> tuple[list[float], float]:
    """Run TRL's SFTTrainer; return the seconds of each update, and the operations of one."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    words = {f"<{number}>": number for number in range(sizes.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")),
        eos_token="<1>",
        pad_token="<2>",
    )
    model = make_random_model(case, sizes, device)
    student = Student(model)
    sequences_per_batch = max(1, sizes.micro_batch // sizes.length)
    texts = [random_tokens(sizes, number).tolist() for number in range(sizes.sequences)]
    completion_mask = [0] * sizes.prompt + [1] * (sizes.length - sizes.prompt)
    data = Dataset.from_dict(
        {"input_ids": texts, "completion_mask": [completion_mask] * len(texts)}
    )
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes the time after each optimizer update."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        settings = SFTConfig(
            output_dir=directory,
            per_device_train_batch_size=sequences_per_batch,
            gradient_accumulation_steps=-(-sizes.sequences // sequences_per_batch),
            max_steps=sizes.updates + 2,
            learning_rate=1e-5,
            bf16=True,
            use_cpu=device == "cpu",
            gradient_checkpointing=bool(case.recompute),
            max_length=None,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    flops = LearningFlops(student)
    sequence_flops = flops.count_sequence(sizes.length, sizes.length - sizes.prompt)
    return [b - a for a, b in pairwise(times[1:])], sequence_flops * sizes.sequences


def time_updates(update: Callable[[], None], repetitions: int, device: str) -> list[float]:
    update()  # a warm-up
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        update()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def random_tokens(sizes: UpdateSizes, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, sizes.vocab, (sizes.length,), generator=generator)


def make_example(sizes: UpdateSizes, number: int) -> ScoredSequence:
    sequence = TokenSequence(random_tokens(sizes, number), sizes.prompt)
    none = np.zeros((sequence.learned, 0), np.int32)
    return ScoredSequence(sequence, placeholder_rows(none))


def make_rollout(sizes: UpdateSizes, number: int) -> ScoredSequence:
    """An answer with random head ids, draws and rows: times do not depend on the values."""
    generator, learned = np.random.default_rng(number), sizes.length - sizes.prompt
    ids = np.stack(
        [generator.choice(sizes.vocab, HEAD + DRAWS, replace=False) for _ in range(learned)]
    )
    draws = TailDraws(torch.from_numpy(ids[:, HEAD:]).int(), torch.full((learned, DRAWS), -4.0))
    text = Rollout(
        random_tokens(sizes, number),
        sizes.prompt,
        torch.from_numpy(ids[:, :HEAD]).int(),
        torch.full((learned,), -2.0),
        truncated=False,
        answer="",
        draws=draws,
    )
    half = np.full((learned, HEAD + DRAWS), -4.0, np.float16)
    of_token = np.full(learned, -2.0, np.float32)
    block = RowBlock(
        ids[:, :HEAD].astype(np.int32),
        half[:, :HEAD],
        np.full(learned, -1.0, np.float32),
        of_token,
        draw_logprobs=half[:, HEAD:],
    )
    return ScoredSequence(text, block)


if __name__ == "__main__":
    main()
