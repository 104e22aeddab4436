"""Four ways to train one student: fine-tuning, offline, on-policy distillation, and RL.

    python -m benchmarks.evidence.methods [--processes 2] [--seeds 5]

Task: sums of two numbers below 100, as in `distill demo`: a teacher of 0.36 M weights that gets
all of them right, a student of 0.11 M that gets a third. Every step learns from 64 sequences, at
two learning rates, with a budget of teacher tokens or without one:

    sft         cross-entropy on the teacher's greedy answers
    offline     forward KL to stored rows of the same answers (k = 8, M = 4)
    on-policy   reverse KL to the teacher's rows of the student's own answers (k = 8, M = 16)
    rl          rewards (exact_match) of 8 answers to each of 8 sums; no teacher

Every 25 steps the run notes the share of right greedy answers to 500 unseen sums. FLOPs of the
student: 6 a weight and token learned from, 2 more for a sampled one. Each run is added to
benchmarks/results/evidence_methods.json when it ends; an interrupted benchmark resumes
there. A run takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.rl.runs import train_once
from benchmarks.rollouts.ahead import run_service
from benchmarks.shared.programs import run_program
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from clients.cli.demos.demo import MAKE_DATA, fill_directories

PRETRAIN = ("student_trainer.tools.pretrain", "--data", "{data}/train.jsonl", "--loss-on", "last")
MAKE_TEACHER = (
    *PRETRAIN,
    *("--out", "{teacher}", "--tokenizer", "characters"),
    *("--layers", "3", "--width", "96", "--steps", "2000", "--until-loss", "0.01"),
)
# The student has the teacher's tokenizer, and stops while most of its answers are wrong.
MAKE_STUDENT = (
    *PRETRAIN,
    *("--out", "{student}", "--tokenizer", "{teacher}"),
    *("--layers", "2", "--width", "64", "--steps", "2000", "--learning-rate", "2e-3"),
    *("--until-loss", "0.85"),
)
STEPS, SEQUENCES, ANSWERS, TOKENS = 300, 64, 8, 4
METHODS = ("sft", "offline", "on-policy", "rl")
RATES = (3e-4, 1e-3)
# Sums whose answers the teacher has written or scored; None: all 9,000 of them.
BUDGETS = (500, None)


@dataclass(frozen=True)
class MethodSetting:
    """One run. sums: the number of different sums to learn from; None: all."""

    method: str
    rate: float
    sums: int | None
    seed: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/evidence/methods"))
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_methods.json")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    work = options.work.absolute()
    make_material(work)
    settings = [
        MethodSetting(method, rate, sums, seed)
        for seed in range(options.seeds)
        for rate in RATES
        for sums in BUDGETS
        for method in METHODS
    ]
    model = AutoModelForCausalLM.from_pretrained(work / "student")
    weights = sum(parameter.numel() for parameter in model.parameters())
    result = load_results(
        options.out, {"machine": describe_machine(), "steps": options.steps, "weights": weights}
    )
    missing = [
        setting for setting in settings if not any(r | vars(setting) == r for r in result["runs"])
    ]
    command = ["teacher_service", "--model", str(work / "teacher"), "--no-cache"]
    with run_service(command, work / "teacher.log", threads=1) as address:

        def add(setting: MethodSetting) -> None:
            name = "-".join(str(value) for value in vars(setting).values())
            _, records, _ = train_once(
                work / "runs" / name, make_job(work, setting, address, options.steps)
            )
            shutil.rmtree(work / "runs" / name)
            run = vars(setting) | {"curve": make_curve(records, setting.method, weights)}
            add_run(options.out, result, run)
            print(vars(setting), run["curve"][-1], flush=True)

        with ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(add, missing))


def make_material(work: Path) -> None:
    """Make the sums, both models, the teacher's answers and stores of their rows, once."""
    (work / "runs").mkdir(parents=True, exist_ok=True)
    for directory, command in (
        ("data", MAKE_DATA),
        ("teacher", MAKE_TEACHER),
        ("student", MAKE_STUDENT),
    ):
        if not (work / directory).exists():
            run_program(
                [sys.executable, "-m", *fill_directories(command, work)], work / "material.log"
            )
    lines = (work / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    for sums in BUDGETS:
        (work / f"train-{sums}.jsonl").write_text("".join(lines[:sums]))
        if not (work / f"rows-{sums}").exists():
            capture_rows(work, work / f"train-{sums}.jsonl", work / f"rows-{sums}")
    if not (work / "rows-held-out").exists():
        capture_rows(work, work / "data" / "heldout.jsonl", work / "rows-held-out")


def capture_rows(work: Path, data: Path, store: Path) -> None:
    """Capture the teacher's rows of the right answers, which are its greedy ones."""
    settings = {
        "teacher": {"model": str(work / "teacher"), "top_k": 8},
        "data": {"path": str(data), "answer_column": "answer"},
        "method": {"type": "capture", "max_tokens": 32, "tail_samples": 4},
    }
    job = work / f"{store.name}.yaml"  # JSON is YAML
    job.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "clients", "capture", str(job), "--store", str(store)]
    run_program([*command, "--runs", str(work / "captures")], work / "material.log")


def make_job(work: Path, setting: MethodSetting, teacher: str, steps: int) -> dict[str, Any]:
    prompts = str(work / f"train-{setting.sums}.jsonl")
    data = {"path": prompts, "eval_path": str(work / "data" / "heldout.jsonl")}
    shared = {
        "student": {"model": str(work / "student")},
        "train": {
            "learning_rate": setting.rate,
            "warmup_steps": 10,
            "prompts_per_step": SEQUENCES // (ANSWERS if setting.method == "rl" else 1),
        },
        "eval": {"every": 25, "prompts": 500, "metric": "exact_match"},
        "checkpoint": {"every": steps},
        "track": {"tensorboard": False},
        "seed": setting.seed,
        "max_steps": steps,
    }
    match setting.method:
        case "sft":
            method = {"type": "sft", "max_new_tokens": TOKENS}
            return {**shared, "data": data | {"answer_column": "answer"}, "method": method}
        case "offline":
            stores = {"path": str(work / f"rows-{setting.sums}")}
            stores["eval_path"] = str(work / "rows-held-out")
            stores["eval_prompts"] = data["eval_path"]
            return {**shared, "data": stores, "method": {"type": "offline"}}
        case "on-policy":
            method = {"max_prompt_tokens": 32, "max_new_tokens": TOKENS}
            return {
                **shared,
                "data": data,
                "method": method,
                "teacher": {"address": teacher, "top_k": 8},
            }
        case "rl":
            method = {"type": "rl", "beta": 0.0, "top_k": 8, "rollouts_per_prompt": ANSWERS}
            method |= {"max_new_tokens": TOKENS}
            return {**shared, "data": data, "method": method, "reward": {"type": "exact_match"}}
    raise AssertionError(setting)


def make_curve(
    records: list[dict[str, float]], method: str, weights: int
) -> list[dict[str, float]]:
    """Return accuracy, FLOPs of the student and tokens of the teacher at every evaluation."""
    sampled = method in ("on-policy", "rl")
    tokens, points = 0.0, []
    for record in records:
        tokens += record.get("tokens", 0.0)
        if "eval/accuracy" in record:
            points.append(
                {
                    "step": record["step"],
                    "accuracy": record["eval/accuracy"],
                    "flops": (8 if sampled else 6) * weights * tokens,
                    "answer_tokens": tokens,
                }
            )
    return points


if __name__ == "__main__":
    main()
