"""Anchors in RL: none, a fixed one and an EMA one, on harder sums, at higher learning rates.

    python -m benchmarks.evidence.anchors [--processes 2] [--seeds 5]

A model of 2 layers is pretrained until it gets some sums right, then learns from the reward
`exact_match` (`benchmarks/rl/runs.py`), for longer than in `benchmarks.rl`. Tasks: sums of two
numbers below 100, below 1,000, and of 1, 2 or 3 digits (graded difficulty). At the end the student
answers each of 200 unseen sums 16 times at temperature 1: the share of right answers (pass@1), the
share of sums with a right one among 8 (pass@8, the estimator of arXiv 2107.03374, equation 1), and
the number of different answers among the 16. Each run is kept in `--work` and added to
benchmarks/results/evidence_anchors.json when it ends; an interrupted benchmark resumes
there. A run takes one or two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.rl.material import VOCABULARY, RlMaterial
from benchmarks.rl.runs import Arm, summarize_metrics, train_once
from benchmarks.shared.programs import one_thread_environment
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from student_trainer.data.prompts import Prompt
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.tools.pretrain import main as pretrain

PROMPTS, ANSWERS, STEPS = 64, 8, 150
ASKED, SAMPLES, TRIES = 200, 16, 8
HEAD = 32


@dataclass(frozen=True)
class SumsTask:
    """Sums of two numbers below `below`; graded: of 1, 2 or 3 digits each, all equally likely.

    until_loss: at which the pretraining stops.
    """

    below: int
    until_loss: float
    graded: bool = False

    def sums(self, count: int) -> list[tuple[int, int]]:
        """Return different sums, in random order."""
        random_ = random.Random(0)
        if not self.graded:
            numbers = random_.sample(range(self.below * self.below), count)
            return [(number // self.below, number % self.below) for number in numbers]
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < count:
            digits = [10 ** random_.randint(1, len(str(self.below - 1))) for _ in range(2)]
            pairs[random_.randrange(digits[0]), random_.randrange(digits[1])] = None
        return list(pairs)


GRADED = "sums of 1 to 3 digits"
TASKS = {
    "sums below 100": SumsTask(100, 0.5),
    "sums below 1,000": SumsTask(1000, 0.6),
    GRADED: SumsTask(1000, 0.6, graded=True),
}
RATES = (3e-4, 1e-3, 3e-3)
ARMS = (
    Arm("no KL"),
    Arm("fixed anchor, beta 0.1", 0.1, tau=1.0),
    Arm("EMA anchor, beta 0.1", 0.1),
    Arm("fixed anchor, beta 1", 1.0, tau=1.0),
    Arm("EMA anchor, beta 1", 1.0),
)


@dataclass(frozen=True)
class AnchorSetting:
    """One run."""

    task: str
    rate: float
    arm: Arm
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        return {"task": self.task, "rate": self.rate, "arm": self.arm.name, "seed": self.seed}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/evidence/anchors"))
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_anchors.json")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the key of the only run, as JSON
    options = parser.parse_args(arguments)
    disable_progress_bar()
    materials = {task: make_material(options.work, task) for task in options.tasks}
    settings = [
        AnchorSetting(task, rate, arm, seed)
        for seed in range(options.seeds)
        for rate in options.rates
        for task in options.tasks
        for arm in ARMS
    ]
    if options.one:
        (setting,) = [setting for setting in settings if setting.key == json.loads(options.one)]
        print(
            json.dumps(
                train_and_examine(options.work, materials[setting.task], setting, options.steps)
            )
        )
        return
    result = load_results(options.out, {"machine": describe_machine(), "steps": options.steps})
    missing = [
        setting for setting in settings if not any(r | setting.key == r for r in result["runs"])
    ]

    def add(setting: AnchorSetting) -> None:
        command = [sys.executable, "-m", "benchmarks.evidence.anchors"]
        command += [*(arguments or sys.argv[1:]), "--one", json.dumps(setting.key)]
        process = subprocess.run(
            command, env=one_thread_environment(), capture_output=True, text=True
        )
        if process.returncode:
            raise SystemExit(process.stderr[-3000:])
        metrics = json.loads(process.stdout.splitlines()[-1])
        add_run(options.out, result, setting.key | metrics)
        print(
            setting.key,
            {name: metrics[name] for name in ("pass@1", "pass@8", "answers")},
            flush=True,
        )

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(add, missing))


def make_material(work: Path, task: str) -> RlMaterial:
    """Make sums and the pretrained model of a task, once."""
    sums = TASKS[task]
    home = (work / f"below-{sums.below}{'-graded' * sums.graded}").absolute()
    material = RlMaterial(home / "train.jsonl", home / "heldout.jsonl", home / "model")
    if material.model.exists():
        return material
    home.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}) + "\n"
        for a, b in sums.sums(10_000)
    ]
    material.held_out.write_text("".join(lines[:1000]))
    material.train.write_text("".join(lines[1000:]))
    partial = material.model.with_suffix(".part")
    arguments = ["--data", str(material.train), "--loss-on", "last", "--out", str(partial)]
    arguments += ["--tokenizer", "bpe", "--vocab-size", str(VOCABULARY), "--layers", "2"]
    arguments += ["--width", "64", "--steps", "4000", "--until-loss", str(sums.until_loss)]
    pretrain([*arguments, "--learning-rate", "3e-3"])
    partial.rename(material.model)
    return material


def train_and_examine(
    work: Path, material: RlMaterial, setting: AnchorSetting, steps: int
) -> dict[str, Any]:
    """Train once; return the metrics of the run and the examination of its student."""
    name = "-".join(str(value) for value in setting.key.values())
    home = work / "runs" / name.replace(" ", "-").replace(",", "")
    home.parent.mkdir(parents=True, exist_ok=True)
    run_directory, records, _ = train_once(home, make_job(material, setting, steps))
    examination = examine(run_directory.export, material.held_out)
    shutil.rmtree(home)
    return asdict(setting.arm) | summarize_metrics(records) | examination


def make_job(material: RlMaterial, setting: AnchorSetting, steps: int) -> dict[str, Any]:
    arm = setting.arm
    anchor = {"anchor": {"tau": arm.tau, "update_period": 10}} if arm.beta else {}
    return {
        "student": {"model": str(material.model)},
        "data": {"path": str(material.train), "eval_path": str(material.held_out)},
        "reward": {"type": "exact_match"},
        **anchor,
        "method": {
            "type": "rl",
            "beta": arm.beta,
            "top_k": HEAD,
            "rollouts_per_prompt": ANSWERS,
            "max_new_tokens": 6,
        },
        "train": {
            "learning_rate": setting.rate,
            "warmup_steps": 5,
            "prompts_per_step": PROMPTS,
        },
        "eval": {"every": max(1, steps // 6), "prompts": ASKED, "metric": "exact_match"},
        "checkpoint": {"every": steps},
        "track": {"tensorboard": False},
        "seed": setting.seed,
        "max_steps": steps,
    }


def examine(model: Path, held_out: Path) -> dict[str, float]:
    """Return pass@1, pass@8 and the number of different answers among SAMPLES to a sum."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lines = [json.loads(line) for line in held_out.read_text().splitlines()[:ASKED]]
    ids = [np.array(tokenizer(line["prompt"])["input_ids"], dtype=np.int32) for line in lines]
    rollouts = HuggingFaceRollouts(
        Sampler(student, tokenizer, top_k=1, temperature=1.0),
        max_new_tokens=6,
        batch_tokens=1 << 14,
    )
    prompts = [Prompt(prompt_ids, "") for prompt_ids in ids for _ in range(SAMPLES)]
    texts = []
    for answers in rollouts.generate(prompts, range(len(prompts)), seed=12345):
        texts += [
            tokenizer.decode(answer.completion, skip_special_tokens=True) for answer in answers
        ]
    assert len(texts) == len(prompts)
    return pass_rates([texts[i : i + SAMPLES] for i in range(0, len(texts), SAMPLES)], lines)


def pass_rates(texts: Sequence[Sequence[str]], lines: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return pass@1, pass@8 and different answers, each the mean over prompts."""
    right_counts = [
        sum(text.strip() == line["answer"] for text in prompt_texts)
        for prompt_texts, line in zip(texts, lines, strict=True)
    ]
    miss_rates = [math.comb(SAMPLES - c, TRIES) / math.comb(SAMPLES, TRIES) for c in right_counts]
    return {
        "pass@1": sum(right_counts) / (SAMPLES * len(right_counts)),
        "pass@8": 1 - sum(miss_rates) / len(miss_rates),
        "answers": sum(len(set(prompt_texts)) for prompt_texts in texts) / len(texts),
    }


if __name__ == "__main__":
    main()
