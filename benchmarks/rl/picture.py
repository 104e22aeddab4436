"""Draws docs/rl.png: held-out accuracy by step for each weight of the KL, and the final values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import BLACK, BLUE, GREEN, RED, YELLOW, draw_figure, style_axis

# By the first words of an arm's name.
COLORS = {
    "no KL": BLACK,
    "fixed anchor, bucket+sampled": RED,
    "EMA anchor, bucket+sampled": BLUE,
    "EMA anchor, published": YELLOW,
    "EMA anchor, k3": GREEN,
}


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    summaries, betas = result["summaries"], result["sizes"]["betas"]

    def plot(_: Any, axes: Any) -> None:
        for axis, beta in zip(axes[0], betas, strict=False):
            _draw_curves(axis, summaries, f"beta {beta:g}")
            if axis is not axes[0][0]:
                axis.sharey(axes[0][0])
        _draw_final_values(axes[0][-1], summaries)
        for axis in axes[0]:
            style_axis(axis)

    return draw_figure(path, plot, columns=len(betas) + 1, size=(6 * len(betas) + 7, 5.8))


def _arm_label(summary: dict[str, Any]) -> str:
    name: str = summary["name"]
    return name.partition(", beta")[0]


def _draw_curves(axis: Any, summaries: list[dict[str, Any]], beta: str) -> None:
    """Draw the mean over seeds with its 95% confidence interval."""
    for summary in summaries:
        if not summary["name"].endswith(beta) and summary["name"] != "no KL":
            continue
        steps = [int(step) for step in summary["curve"]]
        means = [mean for mean, _ in summary["curve"].values()]
        half_widths = [half if math.isfinite(half) else 0 for _, half in summary["curve"].values()]
        color = COLORS[_arm_label(summary)]
        axis.plot(steps, means, color=color, linewidth=2, marker="o", markersize=4,
                  label=_arm_label(summary))  # fmt: skip
        low = [mean - half for mean, half in zip(means, half_widths, strict=True)]
        high = [mean + half for mean, half in zip(means, half_widths, strict=True)]
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set_title(f"held-out accuracy, {beta}", loc="left")
    axis.set_xlabel("step")
    axis.legend(frameon=False, fontsize=11, loc="best")


def _draw_final_values(axis: Any, summaries: list[dict[str, Any]]) -> None:
    """Draw one dot per seed, and the mean with its confidence interval."""
    for position, summary in enumerate(summaries):
        color, (mean, half) = COLORS[_arm_label(summary)], summary["held_out"]
        finals = summary["finals"]
        axis.plot(finals, [position] * len(finals), "o", color=color, markersize=6, alpha=0.5)
        axis.errorbar(mean, position, xerr=half if math.isfinite(half) else 0, color=color,
                      capsize=4, linewidth=2)  # fmt: skip
        axis.annotate(f"{mean:.3f}", (mean, position), (0, 8), textcoords="offset points",
                      ha="center", color=color, fontweight="bold", fontsize=11)  # fmt: skip
    labels = [summary["name"] for summary in summaries]
    for start in (", bucket", " anchor, p", " anchor, k"):
        labels = [label.replace(start, start.replace(", ", ",\n")) for label in labels]
    axis.set_yticks(range(len(summaries)), labels, fontsize=10)
    axis.set_ylim(len(summaries) - 0.4, -0.7)
    axis.margins(x=0.1)
    axis.set_title("after the last step", loc="left")
    axis.set_xlabel("held-out accuracy")
