"""On-policy distillation of SmolLM2-135M, against TRL's DistillationTrainer on the same two cores.

    python -m benchmarks.evidence.trl_training --data train.jsonl [--seeds 3]
        [--vllm .venv-vllm/bin/python]

The pair of `benchmarks/shared/model_pairs.py`: SmolLM2-135M-Instruct teaches a student of 22 of its
30 layers. Each step samples one answer of at most 64 tokens to each of 8 questions of GSM8K at
temperature 1 and makes one update of the reverse KL: AdamW, a constant learning rate, gradients
clipped to norm 1, float32. The runs:

    TRL       DistillationTrainer: generate, the teacher in its process, the exact KL of all logits
    serial    our trainer, which samples, and a teacher service beside it
    ahead     likewise, an engine of transformers samples one step ahead
    vllm      likewise, an engine of vLLM, run by the Python that --vllm names

TRL and "serial", whose stages follow each other, compute with two threads; with an engine, each of
trainer, engine and teacher with one, and engine and teacher with a lower priority. The exact
KL(student||teacher) per token is measured on the student's own answers to 64 held-out questions,
with the same random numbers for each student. The runs of a seed follow one another; each is added
to the results when it ends, and an interrupted benchmark resumes there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rollouts.ahead import run_service
from benchmarks.shared.evaluation import measure_kl
from benchmarks.shared.model_pairs import LONGEST_PROMPT, Pair, load_questions, make_pair
from benchmarks.shared.process_memory import track_peak_of_children
from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory

QUESTIONS, TOKENS, HELD_OUT, LEARNING_RATE = 8, 64, 64, 1e-4
WAYS = ("TRL", "serial", "ahead", "vllm")
THREADS = 2
SKIPPED = 4  # the first steps are not timed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM; without it, no run `vllm`")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trl_training.json"))
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # a run of TRL in this process
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)  # in TRL
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    pair = make_pair("real", options.work, options.data)
    if options.trl:
        train_with_trl(pair, options)
        return
    result = load_stored_result(options.out, options.steps)
    ways = [way for way in options.ways if way != "vllm" or options.vllm]
    for seed in range(options.seeds):
        for way in ways:
            if any((run["way"], run["seed"]) == (way, seed) for run in result["runs"]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = train(way, pair, options, Path(folder), seed)
            result["runs"].append({"way": way, "seed": seed, **run})
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{way}, seed {seed}: {run['seconds']:.2f} s a step, KL {run['kl']:.4f}")
    print_results(result["runs"])


def load_stored_result(path: Path, steps: int) -> dict[str, Any]:
    """Return the stored results, without runs of other settings."""
    settings = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, {os.cpu_count()} cores",
        "steps": steps,
        "questions": QUESTIONS,
        "tokens": TOKENS,
        "learning_rate": LEARNING_RATE,
    }
    stored = json.loads(path.read_text()) if path.exists() else {}
    same_settings = {name: stored.get(name) for name in settings} == settings
    return {**settings, "runs": stored["runs"] if same_settings else []}


def train(
    way: str, pair: Pair, options: argparse.Namespace, folder: Path, seed: int
) -> dict[str, Any]:
    """Train one student; return seconds (the median step), all seconds of steps, peak_bytes of all
    processes together, peak_processes (those of each, see `Peak`), and the KL.
    """
    with track_peak_of_children() as peak:
        if way == "TRL":
            path, steps = run_trl(options, folder / "trl", seed)
        else:
            path, steps = train_here(way, pair, options, folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        for model in (pair.teacher, path)
    )
    held_out = load_questions(options.data, tokenizer, HELD_OUT)
    kl = measure_kl(student, teacher, tokenizer, held_out, TOKENS)
    return {
        "seconds": statistics.median(steps[SKIPPED:]),
        "kl": kl,
        "peak_bytes": peak.bytes,
        "peak_processes": peak.processes,
        "steps_seconds": steps,
    }


def run_trl(
    options: argparse.Namespace, path: Path, seed: int, *, recompute: bool = False
) -> tuple[Path, list[float]]:
    """Train with TRL in a process; return the student's directory and the seconds of each step.

    recompute: whether the backward pass recomputes activations.
    """
    command = [sys.executable, "-m", "benchmarks.evidence.trl_training"]
    command += [
        "--data",
        str(options.data),
        "--work",
        str(options.work),
        "--steps",
        str(options.steps),
    ]
    command += ["--seed", str(seed), "--trl", str(path), *["--recompute"] * recompute]
    process = subprocess.run(command, env=make_environment(THREADS), capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr[-4000:])
    return path, json.loads((path / "seconds.json").read_text())


def make_environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def load_training_texts(data: Path, tokenizer: Any, steps: int) -> list[str]:
    """Return the questions to train on; the first HELD_OUT are for the measurement."""
    prompts = load_questions(data, tokenizer, HELD_OUT + steps * QUESTIONS)[HELD_OUT:]
    return [tokenizer.decode(prompt.ids) for prompt in prompts]


def train_here(
    way: str,
    pair: Pair,
    options: argparse.Namespace,
    folder: Path,
    seed: int,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Path, list[float]]:
    """Train with our trainer; return the directory of the student and the seconds of each step.

    changes: keys of sections of the job, added to those of the benchmark.
    """
    if way == "vllm":
        command = ["student_trainer.rollout_service", "--engine", "vllm"]
        command += ["--model", str(pair.student)]
        command += ["--threads", "1"]
        # As the trainer starts an engine that shares its cores.
        python = ["nice", "-n", "5", str(options.vllm)]
        with run_service(command, folder / "engine.log", threads=1, python=python) as address:
            rollouts = {"engine": "vllm", "address": address, "lag": 1}
            return _train_with_rollouts(
                pair, options, folder, seed, rollouts, changes or {}, threads=1
            )
    rollouts = {"lag": 1} if way == "ahead" else {}
    # The trainer divides its threads with an engine that it starts.
    return _train_with_rollouts(
        pair, options, folder, seed, rollouts, changes or {}, threads=THREADS
    )


def _train_with_rollouts(
    pair: Pair,
    options: argparse.Namespace,
    folder: Path,
    seed: int,
    rollouts: dict[str, Any],
    changes: Mapping[str, Any],
    *,
    threads: int,
) -> tuple[Path, list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(pair.student)
    texts = load_training_texts(options.data, tokenizer, options.steps)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text(lines)
    command = ["teacher_service", "--model", str(pair.teacher), "--no-cache"]
    samples_itself = not rollouts
    # The trainer sets the pace: beside an engine, the teacher computes when the trainer does not.
    python = [sys.executable] if samples_itself else ["nice", "-n", "5", sys.executable]
    threads_of_teacher = THREADS if samples_itself else 1
    log = folder / "teacher.log"
    with run_service(command, log, threads=threads_of_teacher, python=python) as address:
        settings: dict[str, Any] = {
            "student": {"model": str(pair.student)},
            "teacher": {"address": address},
            "data": {"path": str(folder / "prompts.jsonl"), "chat_template": False},
            "seed": seed,
            "max_steps": options.steps,
            "method": {"max_prompt_tokens": LONGEST_PROMPT, "max_new_tokens": TOKENS},
            "train": {"prompts_per_step": QUESTIONS, "learning_rate": LEARNING_RATE},
            "eval": {"every": 10**6, "prompts": 1},
            "checkpoint": {"every": 10**6},
            "track": {"tensorboard": False},
            "rollouts": rollouts,
        }
        settings |= {name: settings[name] | keys for name, keys in changes.items()}
        job = OnPolicyJob.model_validate(settings)
        directory = RunDirectory.create(folder / "run", job)
        process = subprocess.run(
            [sys.executable, "-m", "student_trainer", str(directory.path), "--attempt", "1"],
            env=make_environment(threads),
            capture_output=True,
            text=True,
        )
    if process.returncode:
        raise SystemExit(process.stderr[-4000:])
    metrics = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return directory.export, [line["time/step"] for line in metrics if line.get("time/step")]


def train_with_trl(pair: Pair, options: argparse.Namespace) -> None:
    """Train with TRL; write the student and seconds.json, the seconds of each step, to its path."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    out, ends = options.trl, []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    tokenizer = AutoTokenizer.from_pretrained(pair.student, padding_side="left")
    texts = load_training_texts(options.data, tokenizer, options.steps)
    # Gradient checkpointing, TRL's default, would recompute the student: memory is not short here.
    settings = DistillationConfig(
        output_dir=str(out / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=QUESTIONS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=1.0,
        gradient_checkpointing=options.recompute,
        bf16=False,
        use_cpu=True,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = DistillationTrainer(
        model=cast(Any, AutoModelForCausalLM.from_pretrained(pair.student, dtype=torch.float32)),
        teacher_model=AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    trainer.save_model(str(out))
    shutil.rmtree(out / "trl", ignore_errors=True)
    seconds = [after - before for before, after in pairwise(ends)]
    (out / "seconds.json").write_text(json.dumps(seconds))


def print_results(runs: list[dict[str, Any]]) -> None:
    trl_runs = {run["seed"]: run for run in runs if run["way"] == "TRL"}
    print(
        f"\n{'':<8} seconds a step   times TRL's speed   peak GiB   exact KL held out (each seed)"
    )
    for way in WAYS:
        way_runs = [run for run in runs if run["way"] == way]
        if not way_runs:
            continue
        seconds = statistics.median(run["seconds"] for run in way_runs)
        ratios = [trl_runs[run["seed"]]["seconds"] / run["seconds"] for run in way_runs if trl_runs]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        kl = ", ".join(f"{run['kl']:.3f}" for run in way_runs)
        peaks = [run["peak_bytes"] / (1 << 30) for run in way_runs if "peak_bytes" in run]
        peak = f"{statistics.median(peaks):.2f}" if peaks else "-"
        print(f"{way:<8} {seconds:>14.2f}   {ratio:>17}   {peak:>8}   {kl}")


if __name__ == "__main__":
    main()
