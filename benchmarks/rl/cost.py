"""The cost of an anchor: the same job with and without one, in turns, on a larger model."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.rl.material import Material
from benchmarks.rl.runs import Arm, Sizes, one_run, settings
from student_trainer.tools.pretrain import make_model

WITH, WITHOUT = Arm("anchor", beta=0.001), Arm("none")


def anchor_cost(work: Path, material: Material, sizes: Sizes) -> dict[str, Any]:
    """Return seconds per step and peak memory of both, and the ratio of each pair of runs."""
    model = work / "timed-model"
    weights = _untrained(model, material, sizes)
    short = replace(sizes, steps=sizes.timed_steps, prompts=4, answers=4, updates=1, held_out=8)
    found: dict[str, list[dict[str, Any]]] = {WITH.name: [], WITHOUT.name: []}
    for pair in range(sizes.timed_pairs):
        # Alternate the order, in case the machine becomes slower over time.
        for arm in (WITH, WITHOUT) if pair % 2 else (WITHOUT, WITH):
            job = settings(replace(material, model=model), short, arm, seed=pair)
            job["method"]["max_new_tokens"] = 32
            found[arm.name].append(one_run(work / f"timed-{pair}-{arm.name}", job))
    pairs = list(zip(found[WITH.name], found[WITHOUT.name], strict=True))
    ratios = [one["step_seconds"] / other["step_seconds"] for one, other in pairs]
    more = [one["peak_bytes"] - other["peak_bytes"] for one, other in pairs]
    return {
        "weight_bytes": weights,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "more_bytes": more,
        "more_over_weights": statistics.median(more) / weights,
        "runs": {name: [_brief(run) for run in runs] for name, runs in found.items()},
    }


def _untrained(path: Path, material: Material, sizes: Sizes) -> int:
    """Save an untrained model, for timing only, and return the size of its weights in bytes."""
    layers, width = sizes.timed_model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(material.model)
    torch.manual_seed(0)
    model = make_model(len(tokenizer), tokenizer, layers, width)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    weights: int = sum(parameter.numel() for parameter in model.parameters())
    return 4 * weights


def _brief(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("step_seconds", "seconds", "peak_bytes")}
