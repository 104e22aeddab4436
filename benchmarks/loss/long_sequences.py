"""One training step on a sequence of 4,096 tokens with a vocabulary of 151,936: memory and loss.

    python -m benchmarks.loss.long_sequences [--quick] [--out FILE]

Runs the complete pipeline twice, each time in a fresh process. A trainer samples a completion of
4,095 tokens for a prompt of one token. A teacher process (`--engine fake`: rows from a hash) scores
each token, and the trainer makes one step: forward, backward, AdamW. "fused" is the normal student.
"plain" is the same student forced onto the path for heads that are not linear layers, which
materialises the logits. The student is a random Qwen3 with one layer of width 64 and tied
embeddings, so that the loss dominates. Memory is the peak during the step above the resident memory
just before it, with all rows present: it includes gradients, AdamW's moments and the body's
activations on both paths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.shared.process_memory import MIB, available_bytes, resident_before, resident_peak
from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from student_trainer.assembly import assemble
from student_trainer.teachers.connections import connect
from student_trainer.tools.pretrain import make_model

VOCAB, TOKENS, HEAD = 151_936, 4096, 64
# The number of copies of the logits in memory at the peak of the plain path.
PLAIN_COPIES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="512 tokens, a vocabulary of 4,096")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long_sequences.json"))
    parser.add_argument("--step", nargs=2, metavar=("PATH", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        path, run = options.step
        print(json.dumps(measure_step(RunDirectory(run), fused=path == "fused")))
        return
    vocab, tokens = (4096, 512) if options.quick else (VOCAB, TOKENS)
    needed = PLAIN_COPIES * tokens * vocab * 4
    if available_bytes() < needed:
        sys.exit(f"the plain path needs {needed >> 30} GiB, {available_bytes() >> 30} GiB are free")
    result = compare(vocab, tokens)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)


def compare(vocab: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        save_student(root / "student", vocab, tokens)
        (root / "prompts.jsonl").write_text('{"prompt": "t1", "answer": ""}\n' * 2)
        with serve_teacher(root, vocab) as address:
            config = make_job(root, address, tokens)
            paths = {path: run_path(path, root / path, config) for path in ("fused", "plain")}
    fused, plain = paths["fused"], paths["plain"]
    return {
        "vocabulary": vocab,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "paths": paths,
        "memory_ratio": plain["peak_mib"] / fused["peak_mib"],
        "loss_difference": abs(plain["loss"] / fused["loss"] - 1),
        "gradient_norm_difference": abs(plain["grad_norm"] / fused["grad_norm"] - 1),
    }


def save_student(path: Path, vocab: int, tokens: int) -> None:
    """Save a random student with the fake teacher's tokens t0, t1, ...; none is an end token."""
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    disable_progress_bar()
    torch.manual_seed(0)
    model = make_model(vocab, tokenizer, layers=1, width=64)
    model.config.max_position_embeddings = tokens
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_job(root: Path, address: str, tokens: int) -> OnPolicyJob:
    """Return a job whose step is one micro-batch of one sequence."""
    return OnPolicyJob.model_validate(
        {
            "student": {"model": str(root / "student")},
            "teacher": {"address": address, "top_k": HEAD},
            "data": {"path": str(root / "prompts.jsonl")},
            "method": {"max_prompt_tokens": 1, "max_new_tokens": tokens - 1},
            "train": {"prompts_per_step": 1, "tokens_per_micro_batch": tokens},
            "eval": {"prompts": 1},
            "max_steps": 1,
            "track": {"tensorboard": False},
        }
    )


@contextmanager
def serve_teacher(root: Path, vocab: int) -> Iterator[str]:
    """Start a teacher process and yield its address. It caches the rows that it has scored."""
    options = ["--engine", "fake", "--model", f"vocab={vocab}", "--port", "0"]
    log = root / "teacher.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "teacher_service", *options, "--cache-dir", str(root / "rows")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line.startswith("teacher listening on "):
            raise RuntimeError(f"the teacher did not start: {log.read_text()}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate()


def run_path(path: str, where: Path, config: OnPolicyJob) -> dict[str, float]:
    run = RunDirectory.create(where, config)
    command = [sys.executable, "-m", "benchmarks.loss.long_sequences"]
    command += ["--step", path, str(run.path)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"the {path} path failed: {process.stderr}")
    measurements: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return measurements


def measure_step(run: RunDirectory, *, fused: bool) -> dict[str, float]:
    """Run the job's first step; return its peak memory in MiB, loss per token and seconds."""
    config = run.config()
    progress = Progress(run, attempt=1, max_steps=1, main=True, terminated=lambda: False)
    with connect(config) as teachers, ExitStack() as stack:
        if not fused:
            stack.enter_context(
                patch("student_trainer.model.student.find_logit_map", return_value=None)
            )
        trainer = assemble(config, run, teachers, progress, 1, None)
        started = time.monotonic()
        pending = trainer.method.steps(1).updates[0]
        wait([item.rows for item in pending])
        written = time.monotonic()
        before = resident_before()
        means = trainer.learner.learn(1, pending, config.train.learning_rate)
        return {
            "peak_mib": (resident_peak() - before) / MIB,
            "loss": means["loss"],
            "grad_norm": means["grad_norm"],
            "rows": means["tokens"],
            "seconds": time.monotonic() - written,
            "seconds_before": written - started,
        }


def print_results(result: dict[str, Any]) -> None:
    print(f"V = {result['vocabulary']}, one sequence of {result['tokens']} tokens\n")
    print(f"{'path':<8}{'peak MiB':>10}{'loss':>14}{'rows':>7}{'step s':>8}{'rows s':>8}")
    for path, row in result["paths"].items():
        print(
            f"{path:<8}{row['peak_mib']:>10.0f}{row['loss']:>14.8f}{row['rows']:>7.0f}"
            f"{row['seconds']:>8.1f}{row['seconds_before']:>8.1f}"
        )
    print(f"\nplain over fused: {result['memory_ratio']:.1f}x the memory")
    print(f"apart by, of their values: losses {result['loss_difference']:.1e}, ", end="")
    print(f"norms of the gradients {result['gradient_norm_difference']:.1e}")


if __name__ == "__main__":
    main()
