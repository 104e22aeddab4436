"""The runs of the RL benchmark: one job with different anchors and estimators."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rl.material import RlMaterial, Warm
from benchmarks.shared.process_memory import peak_bytes_of
from benchmarks.shared.programs import ROOT, one_thread_environment
from clients.config.kinds import kind_of
from clients.runs.directory import RunDirectory

HEAD = 32


@dataclass(frozen=True)
class Arm:
    """The settings in which a run differs. With tau = 1, the anchor stays the initial model."""

    name: str
    beta: float = 0.0
    tau: float = 0.9
    estimator: str | None = None  # replaces the head of 32 ids
    tail: str = "bucket+sampled"


@dataclass(frozen=True)
class RlSizes:
    """The sizes that all runs share."""

    warm: Warm
    steps: int
    prompts: int  # of a step, each answered `answers` times
    answers: int
    updates: int  # of a step
    learning_rate: float
    seeds: int
    betas: tuple[float, ...]
    points: int  # of a curve
    held_out: int
    timed_steps: int
    timed_pairs: int
    timed_model: tuple[int, int]  # layers, width


def list_arms(betas: tuple[float, ...]) -> list[Arm]:
    compared_arms = [Arm("no KL")]
    for beta in betas:
        compared_arms += [
            Arm(f"fixed anchor, bucket+sampled, beta {beta:g}", beta, tau=1.0),
            Arm(f"EMA anchor, bucket+sampled, beta {beta:g}", beta),
            Arm(f"EMA anchor, published, beta {beta:g}", beta, tail="published"),
            Arm(f"EMA anchor, k3, beta {beta:g}", beta, estimator="k3"),
        ]
    return compared_arms


def job_settings(material: RlMaterial, sizes: RlSizes, arm: Arm, seed: int) -> dict[str, Any]:
    """Return the job of one run."""
    anchor = {"anchor": {"tau": arm.tau, "update_period": 10}} if arm.beta else {}
    head = {"top_k": 0, "estimator": arm.estimator} if arm.estimator else {"top_k": HEAD}
    return {
        "student": {"model": str(material.model)},
        "data": {"path": str(material.train), "eval_path": str(material.held_out)},
        "reward": {"type": "exact_match"},
        **anchor,
        "method": {
            "type": "rl",
            "beta": arm.beta,
            "tail": arm.tail,
            **head,
            "rollouts_per_prompt": sizes.answers,
            "updates_per_step": sizes.updates,
            "max_new_tokens": 4,
        },
        "train": {
            "learning_rate": sizes.learning_rate,
            "warmup_steps": 5,
            "prompts_per_step": sizes.prompts,
        },
        "eval": {
            "every": max(1, sizes.steps // sizes.points),
            "prompts": sizes.held_out,
            "metric": "exact_match",
        },
        "checkpoint": {"every": sizes.steps},
        "track": {"tensorboard": False},
        "seed": seed,
        "max_steps": sizes.steps,
    }


def run_all(work: Path, material: RlMaterial, sizes: RlSizes) -> Iterator[dict[str, Any]]:
    """Run every arm with every seed and yield the results; finished runs are not repeated.

    The outer loop is over seeds, so that after an interruption all arms have equally many seeds.
    """
    for seed in range(sizes.seeds):
        for arm in list_arms(sizes.betas):
            result_path = work / f"{arm.name.replace(', ', '-').replace(' ', '-')}-seed-{seed}.json"
            if not result_path.exists():
                run_result = asdict(arm) | {"seed": seed}
                run_result |= run_once(
                    result_path.with_suffix(""), job_settings(material, sizes, arm, seed)
                )
                if arm.estimator:  # its rows have a head of one unused id
                    run_result |= {"head_mass": None, "first_head_mass": None}
                partial = result_path.with_suffix(".part")
                partial.write_text(json.dumps(run_result, indent=1) + "\n")
                partial.rename(result_path)
            yield json.loads(result_path.read_text())


def run_once(home: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one job and return its measurements; its directory is removed."""
    _, records, peak = train_once(home, job)
    shutil.rmtree(home)
    return summarize_metrics(records) | {"peak_bytes": peak}


def train_once(
    home: Path, job: Mapping[str, Any]
) -> tuple[RunDirectory, list[dict[str, float]], int]:
    """Run one training job in a new directory `home`.

    Returns the directory, the records of its metrics, and its peak of resident memory in bytes.
    """
    shutil.rmtree(home, ignore_errors=True)
    run_directory = RunDirectory.create(home, kind_of(job).model_validate(job))
    peak = _run_trainer(run_directory.path, home.with_suffix(".log"))
    return (
        run_directory,
        [json.loads(line) for line in run_directory.metrics.read_text().splitlines()],
        peak,
    )


def _run_trainer(run: Path, log: Path) -> int:
    """Run the trainer to its end and return its peak of resident memory in bytes."""
    command = [sys.executable, "-m", "student_trainer", str(run), "--attempt", "1"]
    peak = 0
    with log.open("wb") as out:
        trainer = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=one_thread_environment()
        )
        while trainer.poll() is None:
            # VmHWM is a running maximum, so the last reading is the peak.
            peak = peak_bytes_of(trainer.pid) or peak
            time.sleep(0.2)
    if trainer.returncode:
        words = log.read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError("\n".join(["a run failed:", *words]))
    return peak


def summarize_metrics(records: list[dict[str, float]]) -> dict[str, Any]:
    """Return what the page needs of the metrics of a run."""
    steps = [record for record in records if "time/step" in record]
    late = steps[-max(1, len(steps) // 10) :]

    def mean_of_late_steps(name: str) -> float | None:
        late_values = [record[name] for record in late if name in record]
        return statistics.mean(late_values) if late_values else None

    return {
        "curve": {str(r["step"]): r["eval/accuracy"] for r in records if "eval/accuracy" in r},
        "rewards": [record["reward/mean"] for record in steps],
        "reward": mean_of_late_steps("reward/mean"),
        "entropy": mean_of_late_steps("entropy"),
        "head_mass": mean_of_late_steps("topk/student_mass"),
        "kl_anchor": mean_of_late_steps("kl/anchor"),
        "first_head_mass": steps[0].get("topk/student_mass"),
        # Skip the first steps, which warm up caches.
        "step_seconds": statistics.median(record["time/step"] for record in steps[1:]),
        "seconds": {
            name: statistics.median(record.get(f"time/{name}", 0.0) for record in steps[1:])
            for name in ("rollout", "reward", "anchor", "optim")
        },
        "tokens": sum(record["tokens"] for record in steps),
    }
