"""Writes docs/rl.md: the numbers of a run of the benchmark of reinforcement learning."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.shared.intervals import mean_and_interval
from benchmarks.shared.pages import format_table

PAGE = """\
# Reinforcement learning: measurements

This page compares anchors and estimators of the KL. The command

<!-- needs: half an hour -->
```bash
python -m benchmarks.rl
```

wrote this page, on {machine}, with one thread.

## Setup

A model of {layers} layers of width {width} is pretrained on sums of two numbers below 100 until it
gets some of them right. Its tokens are bytes: the vocabulary has 257 tokens, and the head has
{head}. The model is then trained with the reward `exact_match` for {steps} steps of {prompts}
prompts x {answers} answers, with learning rate {learning_rate:g}, clips 0.2 and 0.28, and GRPO
advantages. The EMA anchor has tau 0.9 and a period of 10 updates. The fixed anchor is the
pretrained model. Every configuration has the same {seeds} seeds. A seed determines prompts and
samples. Task and optimizer are those of `distill demo-rl`.

The pretrained model was selected with another seed, before the comparison, such that the run
without a KL improves. With weaker models, and with other vocabularies, the run did not improve
within these steps. The weights of the KL (beta) are 0.001, as in the paper, and 0.1, for a visible
effect.

![Held-out accuracy by step, and at the end](rl.png)

## Accuracy

| column | meaning |
|---|---|
| held out | final accuracy of greedy answers to {held_out} sums that are not in the training set |
| sampled | mean reward of the answers sampled in the last tenth of the steps |
| head | probability of the student's {head} most likely tokens (at the first step {first_mass}) |
| seconds | median time of a step, on a machine with other load; see [Cost](#cost-of-an-anchor) |
| memory | peak resident memory of the process |

Means over seeds with 95% intervals (Student's t):

{table}

Held-out accuracy before training: {before:.3f}.

## Differences

Paired differences of the held-out accuracy by seed, in percentage points. The result is "not shown"
if the interval contains 0: the difference is not significant. If two configurations are equal, the
interval excludes 0 by chance in one comparison of twenty.

{differences}

## Cost of an anchor

The benchmark runs two jobs alternately, {pairs} times each. One job has an EMA anchor, and a KL
to it in the loss. The other job has the same settings, but no anchor and no KL. Both train a model
of {timed_layers} layers of width {timed_width} ({weights:.0f} MiB of weights), with 16 answers of
at most 32 tokens per step:

| | median | range | target |
|---|---|---|---|
| ratio of step times, with / without the anchor | {ratio:.3f} | {ratios} | at most 1.25 |
| additional peak resident memory, MiB | {more:.0f} | {mores} | |
| the same, divided by the size of the weights | {more_over:.2f} | | 1 |
"""


ARM_COLUMNS = (
    *("configuration", "held out", "sampled", "entropy", "head"),
    *("KL to the anchor", "seconds", "memory, MiB"),
)


def summarize_arms(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one summary per arm over its seeds, in the order of the runs."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    return [_summarize(name, [run for run in runs if run["name"] == name]) for name in names]


def _summarize(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    steps = list(runs[0]["curve"])
    finals = [run["curve"][steps[-1]] for run in runs]
    summary: dict[str, Any] = {
        "name": name,
        "finals": finals,
        "held_out": mean_and_interval(finals),
        "sampled": mean_and_interval([run["reward"] for run in runs]),
        "curve": {step: mean_and_interval([run["curve"][step] for run in runs]) for step in steps},
    }
    for key in ("entropy", "head_mass", "first_head_mass", "kl_anchor"):
        values = [run[key] for run in runs if run[key] is not None]
        summary[key] = statistics.mean(values) if values else None
    for key in ("step_seconds", "peak_bytes"):
        summary[key] = statistics.median(run[key] for run in runs)
    return summary


def format_page(result: dict[str, Any]) -> str:
    """Return docs/rl.md."""
    sizes, arms, cost = result["sizes"], result["summaries"], result["cost"]
    first_mass = next((arm["first_head_mass"] for arm in arms if arm["first_head_mass"]), None)
    layers, width = sizes["timed_model"]
    return PAGE.format(
        **sizes | {"layers": sizes["warm"]["layers"], "width": sizes["warm"]["width"]},
        machine=result["machine"],
        head=result["head"],
        first_mass=_format_number(first_mass),
        table=format_table(ARM_COLUMNS, map(_format_arm, arms)),
        before=next(iter(arms[0]["curve"].values()))[0],
        differences=format_table(
            ["comparison", "points", "95% interval", "result"],
            [_format_difference(arm, baseline) for arm, baseline in pair_arms(arms)],
        ),
        pairs=len(cost["ratios"]),
        timed_layers=layers,
        timed_width=width,
        weights=cost["weight_bytes"] / 2**20,
        ratio=cost["ratio"],
        ratios=_format_range(cost["ratios"], "{:.3f}"),
        more=statistics.median(cost["more_bytes"]) / 2**20,
        mores=_format_range([more / 2**20 for more in cost["more_bytes"]], "{:.0f}"),
        more_over=cost["more_over_weights"],
    )


def pair_arms(arms: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of arms that the benchmark compares: (arm, baseline)."""
    arm_by_name = {arm["name"]: arm for arm in arms}
    pairs = []
    for name in arm_by_name:
        kind, _, beta = name.partition(", ")
        default_name = f"EMA anchor, bucket+sampled, {beta.rpartition(', ')[2]}"
        if name == "no KL":
            continue
        if "bucket+sampled" in name:
            pairs.append((name, "no KL"))
        if kind == "EMA anchor" and name == default_name:
            pairs.append((name, name.replace("EMA", "fixed")))
        elif kind == "EMA anchor":
            pairs.append((default_name, name))
    return [(arm_by_name[arm], arm_by_name[baseline]) for arm, baseline in pairs]


def _format_arm(arm: dict[str, Any]) -> list[str]:
    return [
        arm["name"],
        *(_format_interval(arm[key]) for key in ("held_out", "sampled")),
        *(_format_number(arm[key]) for key in ("entropy", "head_mass")),
        _format_number(arm["kl_anchor"], "{:.4f}"),
        f"{arm['step_seconds']:.3f}",
        f"{arm['peak_bytes'] / 2**20:.0f}",
    ]


def _format_difference(arm: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    differences = [100 * (a - b) for a, b in zip(arm["finals"], baseline["finals"], strict=True)]
    mean, half = mean_and_interval(differences)
    verdict = "not shown" if abs(mean) <= half else "better" if mean > 0 else "worse"
    interval = f"{mean - half:+.1f} to {mean + half:+.1f}" if math.isfinite(half) else "one seed"
    return [f"{arm['name']} against {baseline['name']}", f"{mean:+.1f}", interval, verdict]


def _format_interval(mean_and_half_width: tuple[float, float]) -> str:
    mean, half = mean_and_half_width
    return f"{mean:.3f} +- {half:.3f}" if math.isfinite(half) else f"{mean:.3f}"


def _format_number(number: float | None, form: str = "{:.3f}") -> str:
    return "-" if number is None else form.format(number)


def _format_range(values: list[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"
