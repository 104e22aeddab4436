"""docs/rl.md: the figures of a run of the benchmark of reinforcement learning."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.rl_statistics import mean_and_interval

PAGE = """\
# Reinforcement learning: anchors and estimators

Made by

```bash
python -m benchmarks.rl
```

on {machine}, one thread. A model of {layers} layers of width {width} is made from sums of two
numbers below 100 until it gets some of them right. It reads and writes bytes: the vocabulary has
257 tokens, a head {head} of them. It then learns from the reward `exact_match` for {steps} steps of
{prompts} prompts x {answers} answers, learning rate {learning_rate:g}, clips 0.2 and 0.28, GRPO's
advantages. A moving anchor has tau 0.9 and a period of 10 updates; a fixed one is the model before
any reward. Every line had the same {seeds} seeds; a seed decides prompts and samples. Task and
optimizer are those of `distill demo-rl`. What the model begins with was chosen by whether the run
without a KL learns at all, on another seed, and before any other line was run: from a weaker model,
and with other vocabularies, it did not within so few steps. The weights of the KL (beta) are the
paper's 0.001, and 0.1 so that it is felt.

![held-out accuracy by step, and at the end](rl.png)

## What came out

*Held out*: greedy answers to {held_out} sums that are in no training set, after the last step.
*Sampled*: the mean reward of the answers sampled in the last tenth of the steps. Mean over seeds
and its 95% interval (Student's t). *Head*: what the student's {head} likeliest tokens hold (at the
first step {first_mass}). *Seconds*: the median step, with all that the
machine did besides; what an anchor costs is told below. *Memory*: the most that the process had
resident.

| | held out | sampled | entropy | head | KL to the anchor | seconds | memory, MiB |
|---|---|---|---|---|---|---|---|
{table}

Before any reward: {before:.3f} held out.

## Differences

Of the held-out accuracy, in points, seed by seed; a difference whose interval has 0 in it was not
shown. Of so many comparisons, one in twenty is shown by chance.

| | points | 95% interval | |
|---|---|---|---|
{differences}

## What an anchor costs

The same job with an anchor and without, in turns, {pairs} times each, on a model of {timed_layers}
layers of width {timed_width} ({weights:.0f} MiB of weights), 16 answers of at most 32 tokens a
step. A step takes {ratio:.3f} times as long with the anchor (median; {ratios}); aimed at: at most
1.25 times. The process has {more:.0f} MiB more resident at its peak (median; {mores}), that is
{more_over:.2f} copies of the weights; aimed at: one.
"""


def summaries(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each arm, over its seeds, in the order of the runs."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    return [_summary(name, [run for run in runs if run["name"] == name]) for name in names]


def _summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    steps = list(runs[0]["curve"])
    finals = [run["curve"][steps[-1]] for run in runs]
    found: dict[str, Any] = {
        "name": name,
        "finals": finals,
        "held_out": mean_and_interval(finals),
        "sampled": mean_and_interval([run["reward"] for run in runs]),
        "curve": {step: mean_and_interval([run["curve"][step] for run in runs]) for step in steps},
    }
    for key in ("entropy", "head_mass", "first_head_mass", "kl_anchor"):
        values = [run[key] for run in runs if run[key] is not None]
        found[key] = statistics.mean(values) if values else None
    for key in ("step_seconds", "peak_bytes"):
        found[key] = statistics.median(run[key] for run in runs)
    return found


def page(result: dict[str, Any]) -> str:
    sizes, lines, cost = result["sizes"], result["summaries"], result["cost"]
    mass = next((line["first_head_mass"] for line in lines if line["first_head_mass"]), None)
    layers, width = sizes["timed_model"]
    return PAGE.format(
        **sizes | {"layers": sizes["warm"]["layers"], "width": sizes["warm"]["width"]},
        machine=result["machine"],
        head=result["head"],
        first_mass=_cell(mass),
        table="\n".join(_line(line) for line in lines),
        before=next(iter(lines[0]["curve"].values()))[0],
        differences="\n".join(_difference(*pair) for pair in compared(lines)),
        pairs=len(cost["ratios"]),
        timed_layers=layers,
        timed_width=width,
        weights=cost["weight_bytes"] / 2**20,
        ratio=cost["ratio"],
        ratios=_span(cost["ratios"], "{:.3f}"),
        more=statistics.median(cost["more_bytes"]) / 2**20,
        mores=_span([more / 2**20 for more in cost["more_bytes"]], "{:.0f}"),
        more_over=cost["more_over_weights"],
    )


def compared(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(this one, against that one): what the benchmark is there to tell."""
    by_name = {line["name"]: line for line in lines}
    found = []
    for name in by_name:
        kind, _, beta = name.partition(", ")
        ours = f"EMA anchor, bucket+sampled, {beta.rpartition(', ')[2]}"
        if name == "no KL":
            continue
        if "bucket+sampled" in name:
            found.append((name, "no KL"))
        if kind == "EMA anchor" and name == ours:
            found.append((name, name.replace("EMA", "fixed")))
        elif kind == "EMA anchor":
            found.append((ours, name))
    return [(by_name[one], by_name[other]) for one, other in found]


def _line(line: dict[str, Any]) -> str:
    cells = [
        line["name"],
        *(_interval(line[key]) for key in ("held_out", "sampled")),
        *(_cell(line[key]) for key in ("entropy", "head_mass")),
        _cell(line["kl_anchor"], "{:.4f}"),
        f"{line['step_seconds']:.3f}",
        f"{line['peak_bytes'] / 2**20:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    apart = [100 * (a - b) for a, b in zip(one["finals"], other["finals"], strict=True)]
    mean, half = mean_and_interval(apart)
    verdict = "not shown" if abs(mean) <= half else "better" if mean > 0 else "worse"
    where = f"{mean - half:+.1f} to {mean + half:+.1f}" if math.isfinite(half) else "one seed"
    return f"| {one['name']} against {other['name']} | {mean:+.1f} | {where} | {verdict} |"


def _interval(value: tuple[float, float]) -> str:
    mean, half = value
    return f"{mean:.3f} +- {half:.3f}" if math.isfinite(half) else f"{mean:.3f}"


def _cell(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _span(values: list[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"
