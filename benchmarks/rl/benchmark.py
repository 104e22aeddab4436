"""Reinforcement learning: the effect of the anchor, the KL estimators, and the cost of the anchor.

    python -m benchmarks.rl [--work runs/rl] [--quick]

The same small model learns from the same rewards without KL, with a KL to a fixed anchor, and with
a KL to an EMA anchor. The KL is estimated in three ways, each with several seeds. Writes
docs/rl.md, the same numbers as benchmarks/results/rl.json and, if matplotlib is installed,
docs/rl.png. Finished runs are kept in `--work`, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.rl.cost import measure_anchor_cost
from benchmarks.rl.material import RlMaterial, Warm, make_material
from benchmarks.rl.page import format_page, summarize_arms
from benchmarks.rl.picture import draw
from benchmarks.rl.runs import HEAD, RlSizes, run_all
from benchmarks.shared.pages import write_page

# Task and optimizer are those of `distill demo-rl`; a better initial model learns faster.
FULL = RlSizes(
    warm=Warm(layers=2, width=64, steps=2000, until_loss=0.5),
    steps=60,
    prompts=64,
    answers=8,
    updates=1,
    learning_rate=3e-4,
    seeds=5,
    # The paper's value, and 100 times that value, which has an effect within so few steps.
    betas=(0.001, 0.1),
    points=6,
    held_out=500,
    timed_steps=6,
    timed_pairs=5,
    timed_model=(6, 512),
)
QUICK = RlSizes(
    warm=Warm(layers=1, width=32, steps=3, until_loss=0.0),
    steps=2,
    prompts=2,
    answers=2,
    updates=2,
    learning_rate=1e-3,
    seeds=1,
    betas=(),
    points=1,
    held_out=8,
    timed_steps=2,
    timed_pairs=2,
    timed_model=(1, 32),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/rl"), help="keeps what is done")
    parser.add_argument("--quick", action="store_true", help="tiny, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rl.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    sizes = QUICK if options.quick else FULL
    material = make_material(options.work, sizes.warm)
    result = run_benchmark(_work_directory(options.work, sizes), material, sizes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.docs.mkdir(parents=True, exist_ok=True)
    print(draw(result, options.docs / "rl.png"))
    print(write_page(options.docs / "rl.md", format_page(result)))


def _work_directory(work: Path, sizes: RlSizes) -> Path:
    """Return the directory for runs of these sizes; other sizes get another directory."""
    digest = hashlib.sha256(json.dumps(asdict(sizes)).encode()).hexdigest()
    home = (work / f"runs-{digest[:12]}").absolute()
    home.mkdir(parents=True, exist_ok=True)
    return home


def run_benchmark(work: Path, material: RlMaterial, sizes: RlSizes) -> dict[str, Any]:
    runs = []
    for run in run_all(work, material, sizes):
        runs.append(run)
        last = list(run["curve"].values())[-1]
        print(f"{run['name']}, seed {run['seed']}: {last:.3f}", flush=True)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "sizes": asdict(sizes),
        "head": HEAD,
        "summaries": summarize_arms(runs),
        "runs": runs,
        "cost": measure_anchor_cost(work, material, sizes),
    }


if __name__ == "__main__":
    main()
