"""Draws the pictures of docs/evidence.md; each function returns nothing and writes one file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.intervals import mean_and_interval
from benchmarks.shared.pictures import unadorned

COLORS = {
    "none": "#9aa0a6",
    "renormalised": "#a142f4",
    "bucket": "#f9ab00",
    "published": "#d93025",
    "bucket+sampled": "#188038",
    "bucket+draws": "#1a73e8",
    "bucket+teacher_samples": "#1a73e8",
}
SIDES = {"no KL": "#202124", "fixed anchor": "#d93025", "EMA anchor": "#1a73e8"}
METHODS = {"sft": "#9aa0a6", "offline": "#f9ab00", "on-policy": "#1a73e8", "rl": "#d93025"}


def pyplot() -> Any:
    """Return matplotlib's pyplot, without a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.titlesize": 13, "figure.dpi": 100})
    return plt


def gradients(found: Mapping[str, Any], path: Path) -> None:
    """Bias (full) and sd of one token (dashed) by k, of the trained student, both directions."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(13, 9), layout="constrained", sharex=True)
    groups = [one for one in found["groups"] if one["student"] != "before"]
    for column, direction in enumerate(("reverse", "forward")):
        for name, axis in zip(("bias", "sd"), panels[:, column], strict=True):
            for tail, color in COLORS.items():
                mine = [
                    one
                    for one in groups
                    if (one["group"], one["direction"], one["tail"]) == ("all", direction, tail)
                ]
                if not mine or max(one[name][0] for one in mine) < 1e-6:
                    continue
                ks = [one["k"] for one in mine]
                axis.plot(ks, [one[name][0] for one in mine], color=color, marker="o", label=tail)
                low, high = ([one[name][side] for one in mine] for side in (1, 2))
                axis.fill_between(ks, low, high, color=color, alpha=0.12, linewidth=0)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{direction} KL: {name} over |gradient|", loc="left")
            axis.legend(frameon=False, fontsize=10)
            unadorned(axis)
        panels[1, column].set_xlabel("head ids k")
    figure.savefig(path)
    plt.close(figure)


def anchors(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean and 95% interval of pass@1 and pass@8 of each arm; a panel for each task and rate."""
    plt = pyplot()
    cases = sorted({(run["task"], run["rate"]) for run in runs})
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    size = (6.5 * len(cases), 5.5)
    figure, panels = plt.subplots(1, len(cases), figsize=size, layout="constrained", squeeze=False)
    for axis, (task, rate) in zip(panels[0], cases, strict=True):
        for place, arm in enumerate(arms):
            mine = [r for r in runs if (r["task"], r["rate"], r["arm"]) == (task, rate, arm)]
            if not mine:
                continue
            color = SIDES[arm.partition(",")[0]]
            for name, marker in (("pass@1", "o"), ("pass@8", "^")):
                values = [run[name] for run in mine]
                mean, half = mean_and_interval(values)
                bar = half if len(values) > 1 else 0
                axis.errorbar(mean, -place, xerr=bar, color=color, marker=marker, capsize=3)
                axis.plot(values, [-place - 0.18] * len(values), "|", color=color, alpha=0.5)
        axis.set_yticks([-place for place in range(len(arms))], arms)
        axis.set_title(f"{task}, learning rate {rate:g}", loc="left")
        axis.set_xlabel("circles: pass@1, triangles: pass@8")
        unadorned(axis)
        if axis is not panels[0][0]:
            axis.tick_params(labelleft=False)
    figure.savefig(path)
    plt.close(figure)


def methods(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy by FLOPs of the student: medians over seeds, a panel for each rate and budget."""
    plt = pyplot()
    cases = sorted({(run["rate"], run["sums"] or 0) for run in runs})
    figure, panels = plt.subplots(
        1, len(cases), figsize=(5.5 * len(cases), 5), layout="constrained", sharey=True
    )
    for axis, (rate, sums) in zip(panels, cases, strict=True):
        for method, color in METHODS.items():
            mine = [
                run["curve"]
                for run in runs
                if (run["rate"], run["sums"] or 0, run["method"]) == (rate, sums, method)
            ]
            if not mine:
                continue
            points = list(zip(*mine, strict=True))
            flops = [statistics.median(one["flops"] for one in point) / 1e9 for point in points]
            for part, style in ((statistics.median, "-"), (min, ":"), (max, ":")):
                heights = [part(one["accuracy"] for one in point) for point in points]
                label = method if style == "-" else None
                axis.plot(flops, heights, style, color=color, label=label)
        budget = f"{sums} sums" if sums else "9,000 sums"
        axis.set_title(f"{budget}, learning rate {rate:g}", loc="left")
        axis.set_xlabel("GFLOPs of the student")
        axis.legend(frameon=False)
        unadorned(axis)
    panels[0].set_ylabel("right answers, unseen sums")
    figure.savefig(path)
    plt.close(figure)


def real_methods(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Both KL at the end of every run, a dot a seed; on-policy also after 3/4 of the steps."""
    plt = pyplot()
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(6.5 * len(tasks), 5.5), layout="constrained", squeeze=False
    )
    for axis, task in zip(panels[0], tasks, strict=True):
        for method, color in METHODS.items():
            mine = [run["curve"] for run in runs if (run["task"], run["method"]) == (task, method)]
            for number, curve in enumerate(mine):
                for point in curve:
                    last = point is curve[-1]
                    axis.plot(
                        point["kl_own"],
                        point["kl_teacher"],
                        "o",
                        color=color,
                        fillstyle="full" if last else "none",
                        label=f"{method}, {point['step']} steps" if not number else None,
                    )
        axis.set_title(task, loc="left")
        axis.set_xlabel("KL(student||teacher), own answers, nats")
        axis.legend(frameon=False)
        unadorned(axis)
    panels[0][0].set_ylabel("KL(teacher||student), its answers, nats")
    figure.savefig(path)
    plt.close(figure)


def offline(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out KL of every loss, a dot a seed."""
    plt = pyplot()
    ways = sorted(
        {run["way"] for run in runs if run["way"] != "before"},
        key=lambda way: statistics.mean(run["kl"] for run in runs if run["way"] == way),
    )
    figure, axis = plt.subplots(figsize=(10, 0.42 * len(ways) + 1.2), layout="constrained")
    for place, way in enumerate(ways):
        values = [run["kl"] for run in runs if run["way"] == way]
        color = COLORS.get(way.partition(",")[0], "#202124")
        axis.plot(values, [-place] * len(values), "o", color=color)
    axis.set_yticks([-place for place in range(len(ways))], ways)
    axis.set_xlabel("KL(teacher||student) a token, held out, nats")
    unadorned(axis)
    figure.savefig(path)
    plt.close(figure)
