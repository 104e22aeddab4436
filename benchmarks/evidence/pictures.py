"""Draws the pictures of docs/evidence.md; each function returns a message."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.intervals import mean_and_interval
from benchmarks.shared.pictures import (
    BLACK,
    BLUE,
    GREY,
    RED,
    TAIL_COLORS,
    YELLOW,
    draw_figure,
    style_axis,
)

GRADIENT_TAILS = (
    *("none", "renormalised", "bucket", "published", "bucket+sampled", "bucket+draws"),
    "bucket+teacher_samples",
)
ANCHOR_COLORS = {"no KL": BLACK, "fixed anchor": RED, "EMA anchor": BLUE}
METHOD_COLORS = {"sft": GREY, "offline": YELLOW, "on-policy": BLUE, "rl": RED}


def draw_gradients(result: Mapping[str, Any], path: Path) -> str:
    """Draw bias and sd of one token by k, of the trained student, in both directions."""
    groups = [group for group in result["groups"] if group["student"] != "before"]

    def plot(_: Any, axes: Any) -> None:
        for column, direction in enumerate(("reverse", "forward")):
            for metric, axis in zip(("bias", "sd"), axes[:, column], strict=True):
                for tail in GRADIENT_TAILS:
                    _plot_gradient(axis, groups, direction, tail, metric)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_title(f"{direction} KL: {metric} over |gradient|", loc="left")
                axis.legend(frameon=False, fontsize=10)
                style_axis(axis)
            axes[1, column].set_xlabel("head ids k")

    return draw_figure(path, plot, rows=2, columns=2, size=(13, 9), sharex=True)


def _plot_gradient(
    axis: Any, groups: Sequence[Mapping[str, Any]], direction: str, tail: str, metric: str
) -> None:
    """Plot a metric of one tail mode by k with its 95% interval, unless it is 0."""
    key = {"group": "all", "direction": direction, "tail": tail}
    tail_groups = [group for group in groups if dict(group) | key == group]
    if not tail_groups or max(group[metric][0] for group in tail_groups) < 1e-6:
        return
    ks = [group["k"] for group in tail_groups]
    means, low, high = ([group[metric][part] for group in tail_groups] for part in range(3))
    axis.plot(ks, means, color=TAIL_COLORS[tail], marker="o", label=tail)
    axis.fill_between(ks, low, high, color=TAIL_COLORS[tail], alpha=0.12, linewidth=0)


def draw_anchors(runs: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Mean and 95% interval of pass@1 and pass@8 of each arm; a panel for each task and rate."""
    cases = sorted({(run["task"], run["rate"]) for run in runs})
    arms = list(dict.fromkeys(run["arm"] for run in runs))

    def plot(_: Any, axes: Any) -> None:
        for axis, (task, rate) in zip(axes[0], cases, strict=True):
            for number, arm in enumerate(arms):
                key = (task, rate, arm)
                arm_runs = [run for run in runs if (run["task"], run["rate"], run["arm"]) == key]
                if arm_runs:
                    _plot_arm(axis, arm_runs, -number, ANCHOR_COLORS[arm.partition(",")[0]])
            axis.set_yticks([-number for number in range(len(arms))], arms)
            axis.set_title(f"{task}, learning rate {rate:g}", loc="left")
            axis.set_xlabel("circles: pass@1, triangles: pass@8")
            style_axis(axis)
            if axis is not axes[0][0]:
                axis.tick_params(labelleft=False)

    return draw_figure(path, plot, columns=len(cases), size=(6.5 * len(cases), 5.5))


def _plot_arm(axis: Any, runs: Sequence[Mapping[str, Any]], height: float, color: str) -> None:
    for metric, marker in (("pass@1", "o"), ("pass@8", "^")):
        values = [run[metric] for run in runs]
        mean, half_width = mean_and_interval(values)
        error = half_width if len(values) > 1 else 0
        axis.errorbar(mean, height, xerr=error, color=color, marker=marker, capsize=3)
        axis.plot(values, [height - 0.18] * len(values), "|", color=color, alpha=0.5)


def draw_methods(runs: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Accuracy by FLOPs of the student: medians over seeds, a panel for each rate and budget."""
    cases = sorted({(run["rate"], run["sums"] or 0) for run in runs})

    def plot(_: Any, axes: Any) -> None:
        for axis, (rate, sums) in zip(axes[0], cases, strict=True):
            for method, color in METHOD_COLORS.items():
                curves = [
                    run["curve"]
                    for run in runs
                    if (run["rate"], run["sums"] or 0, run["method"]) == (rate, sums, method)
                ]
                if curves:
                    _plot_method(axis, curves, method, color)
            budget = f"{sums} sums" if sums else "9,000 sums"
            axis.set_title(f"{budget}, learning rate {rate:g}", loc="left")
            axis.set_xlabel("GFLOPs of the student")
            axis.legend(frameon=False)
            style_axis(axis)
        axes[0][0].set_ylabel("right answers, unseen sums")

    return draw_figure(path, plot, columns=len(cases), size=(5.5 * len(cases), 5), sharey=True)


def _plot_method(
    axis: Any, curves: Sequence[Sequence[Mapping[str, Any]]], method: str, color: str
) -> None:
    """Plot the median over seeds as a line, the lowest and the highest value as dots."""
    points = list(zip(*curves, strict=True))
    flops = [statistics.median(run["flops"] for run in point) / 1e9 for point in points]
    for aggregate, style in ((statistics.median, "-"), (min, ":"), (max, ":")):
        accuracies = [aggregate(run["accuracy"] for run in point) for point in points]
        label = method if style == "-" else None
        axis.plot(flops, accuracies, style, color=color, label=label)


def draw_real_methods(runs: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Both KL at the end of every run, a dot a seed; on-policy also after 3/4 of the steps."""
    tasks = list(dict.fromkeys(run["task"] for run in runs))

    def plot(_: Any, axes: Any) -> None:
        for axis, task in zip(axes[0], tasks, strict=True):
            for method, color in METHOD_COLORS.items():
                curves = [
                    run["curve"] for run in runs if (run["task"], run["method"]) == (task, method)
                ]
                for number, curve in enumerate(curves):
                    for point in curve:
                        axis.plot(
                            point["kl_own"],
                            point["kl_teacher"],
                            "o",
                            color=color,
                            fillstyle="full" if point is curve[-1] else "none",
                            label=f"{method}, {point['step']} steps" if not number else None,
                        )
            axis.set_title(task, loc="left")
            axis.set_xlabel("KL(student||teacher), own answers, nats")
            axis.legend(frameon=False)
            style_axis(axis)
        axes[0][0].set_ylabel("KL(teacher||student), its answers, nats")

    return draw_figure(path, plot, columns=len(tasks), size=(6.5 * len(tasks), 5.5))


def draw_offline(runs: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Held-out KL of every loss, a dot a seed."""
    losses = sorted(
        {run["way"] for run in runs if run["way"] != "before"},
        key=lambda loss: statistics.mean(run["kl"] for run in runs if run["way"] == loss),
    )

    def plot(_: Any, axes: Any) -> None:
        axis = axes[0][0]
        for number, loss in enumerate(losses):
            kls = [run["kl"] for run in runs if run["way"] == loss]
            color = TAIL_COLORS.get(loss.partition(",")[0], BLACK)
            axis.plot(kls, [-number] * len(kls), "o", color=color)
        axis.set_yticks([-number for number in range(len(losses))], losses)
        axis.set_xlabel("KL(teacher||student) a token, held out, nats")
        style_axis(axis)

    return draw_figure(path, plot, size=(10, 0.42 * len(losses) + 1.2))
