"""The benchmark of reinforcement learning runs, resumes, and computes correct statistics."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rl import benchmark as rl
from benchmarks.rl import cost as rl_cost
from benchmarks.rl import runs as rl_runs
from benchmarks.rl.page import format_page, summarize_arms
from benchmarks.rl.picture import draw
from benchmarks.rl.runs import list_arms
from benchmarks.shared.intervals import mean_and_interval
from clients.config.rl import RLJob

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("forked_python")
def test_the_quick_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm is trained; the cost of an anchor is computed from fixed times."""
    timed: list[RLJob] = []

    def measure_given(_: Path, job: Any) -> dict[str, Any]:
        timed.append(RLJob.model_validate(job))
        has_anchor = timed[-1].method.beta > 0
        return {"step_seconds": 1.2 if has_anchor else 1.0, "seconds": {}, "peak_bytes": 0}

    monkeypatch.setattr(rl_cost, "run_once", measure_given)
    out, docs, work = (tmp_path / name for name in ("out.json", "docs", "work"))
    arguments = ["--quick", "--out", str(out), "--docs", str(docs), "--work", str(work)]
    threads = torch.get_num_threads()
    try:
        rl.main(arguments)
        # What is finished is not done again.
        monkeypatch.setattr(rl_runs, "run_once", lambda *_: pytest.fail("a run was repeated"))
        rl.main(arguments)
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    (run,) = result["runs"]
    assert list(run["curve"]) == ["0", "2"]
    assert len(run["rewards"]) == 2
    assert run["kl_anchor"] is None
    assert run["peak_bytes"] > 100 << 20  # torch alone
    assert result["cost"]["ratio"] == pytest.approx(1.2)
    assert [job.method.beta > 0 for job in timed[:4]] == [False, True, True, False]
    assert "| no KL | 0." in (docs / "rl.md").read_text()


def test_every_arm_is_a_job_and_differs_in_what_its_name_says() -> None:
    material = rl.RlMaterial(*(Path(name) for name in ("/train", "/held", "/model")))
    jobs = {
        arm.name: RLJob.model_validate(rl_runs.job_settings(material, rl.FULL, arm, seed=3))
        for arm in list_arms((0.001,))
    }
    assert [(job.method.beta, job.anchor.tau, job.method.top_k) for job in jobs.values()] == [
        (0.0, 0.95, 32),
        (0.001, 1.0, 32),
        (0.001, 0.9, 32),
        (0.001, 0.9, 32),
        (0.001, 0.9, 0),
    ]
    published, k3 = list(jobs.values())[3:]
    assert published.method.tail == "published"
    assert k3.method.estimator == "k3"
    shared_keys = {"train", "eval", "seed", "max_steps", "reward", "data", "student"}
    assert len({job.model_dump_json(include=shared_keys) for job in jobs.values()}) == 1


def test_intervals() -> None:
    """95% of the intervals of simulated samples contain the known mean."""
    rng = random.Random(0)
    intervals_with_mean = 0
    for _ in range(4000):
        mean, half = mean_and_interval([rng.gauss(3, 2) for _ in range(5)])
        intervals_with_mean += abs(mean - 3) <= half
    assert intervals_with_mean / 4000 == pytest.approx(0.95, abs=0.012)
    assert mean_and_interval([1.0]) == (1.0, math.inf)


def invent_runs() -> list[dict[str, Any]]:
    """`fixed` is three points above the rest for every seed, which differ by more than that."""
    runs = []
    for seed in range(5):
        for arm in list_arms((0.001, 0.1)):
            final = 0.5 + 0.1 * seed + 0.03 * arm.name.startswith("fixed") + 0.001 * (seed % 2)
            runs.append(
                {
                    "name": arm.name,
                    "curve": {"0": 0.2, "40": (0.2 + final) / 2, "80": final},
                    "reward": final - 0.1,
                    "entropy": 2.5,
                    "head_mass": None if arm.estimator else 0.8,
                    "first_head_mass": None if arm.estimator else 0.6,
                    "kl_anchor": 0.01 if arm.beta else None,
                    "step_seconds": 0.3,
                    "peak_bytes": 600 << 20,
                }
            )
    return runs


def test_page_and_picture(tmp_path: Path) -> None:
    runs = invent_runs()
    result = {
        "machine": "a machine",
        "sizes": rl.asdict(rl.FULL),
        "head": 32,
        "runs": runs,
        "summaries": summarize_arms(runs),
        "cost": {
            "weight_bytes": 80 << 20,
            "ratios": [1.1, 1.2],
            "ratio": 1.15,
            "more_bytes": [80 << 20, 84 << 20],
            "more_over_weights": 1.02,
        },
    }
    text = format_page(result)
    fixed_arm = "fixed anchor, bucket+sampled, beta 0.1"
    assert f"| {fixed_arm} against no KL | +3.0 | +3.0 to +3.0 | better |" in text
    ema_arm = "EMA anchor, bucket+sampled, beta 0.1"
    assert f"| {ema_arm} against {fixed_arm} | -3.0 | -3.0 to -3.0 | worse |" in text
    expected_line = (
        f"| {ema_arm} against EMA anchor, k3, beta 0.1 | +0.0 | +0.0 to +0.0 | not shown |"
    )
    assert expected_line in text
    lines = {line["name"]: line for line in result["summaries"]}
    finals = [0.5, 0.601, 0.7, 0.801, 0.9]
    assert lines["no KL"]["finals"] == pytest.approx(finals)
    mean, half = lines["no KL"]["held_out"]
    assert (mean, half) == pytest.approx(
        (statistics.mean(finals), 2.776 * statistics.stdev(finals) / math.sqrt(5))
    )
    assert draw(result, tmp_path / "rl.png").startswith(("wrote", "no picture"))
