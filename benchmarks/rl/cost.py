"""The cost of an anchor: the same job with and without one, in turns, on a larger model."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.rl.material import RlMaterial
from benchmarks.rl.runs import Arm, RlSizes, job_settings, run_once
from student_trainer.tools.pretrain import make_model

WITH, WITHOUT = Arm("anchor", beta=0.001), Arm("none")


def measure_anchor_cost(work: Path, material: RlMaterial, sizes: RlSizes) -> dict[str, Any]:
    """Return seconds per step and peak memory of both, and the ratio of each pair of runs."""
    model = work / "timed-model"
    weights = _save_untrained_model(model, material, sizes)
    short_sizes = replace(
        sizes, steps=sizes.timed_steps, prompts=4, answers=4, updates=1, held_out=8
    )
    runs_by_arm: dict[str, list[dict[str, Any]]] = {WITH.name: [], WITHOUT.name: []}
    for pair in range(sizes.timed_pairs):
        # Alternate the order, in case the machine becomes slower over time.
        for arm in (WITH, WITHOUT) if pair % 2 else (WITHOUT, WITH):
            job = job_settings(replace(material, model=model), short_sizes, arm, seed=pair)
            job["method"]["max_new_tokens"] = 32
            runs_by_arm[arm.name].append(run_once(work / f"timed-{pair}-{arm.name}", job))
    pairs = list(zip(runs_by_arm[WITH.name], runs_by_arm[WITHOUT.name], strict=True))
    ratios = [
        with_anchor["step_seconds"] / without_anchor["step_seconds"]
        for with_anchor, without_anchor in pairs
    ]
    additional_bytes = [
        with_anchor["peak_bytes"] - without_anchor["peak_bytes"]
        for with_anchor, without_anchor in pairs
    ]
    return {
        "weight_bytes": weights,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "more_bytes": additional_bytes,
        "more_over_weights": statistics.median(additional_bytes) / weights,
        "runs": {
            name: [_select_measurements(run) for run in runs] for name, runs in runs_by_arm.items()
        },
    }


def _save_untrained_model(path: Path, material: RlMaterial, sizes: RlSizes) -> int:
    """Save an untrained model, for timing only, and return the size of its weights in bytes."""
    layers, width = sizes.timed_model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(material.model)
    torch.manual_seed(0)
    model = make_model(len(tokenizer), tokenizer, layers, width)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    weights: int = sum(parameter.numel() for parameter in model.parameters())
    return 4 * weights


def _select_measurements(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("step_seconds", "seconds", "peak_bytes")}
