"""Draws docs/rl.png: held-out accuracy by step for each weight of the KL, and the final values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import unadorned

# By the first words of an arm's name.
COLORS = {
    "no KL": "#202124",
    "fixed anchor, bucket+sampled": "#d93025",
    "EMA anchor, bucket+sampled": "#1a73e8",
    "EMA anchor, published": "#f9ab00",
    "EMA anchor, k3": "#188038",
}


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines, betas = result["summaries"], result["sizes"]["betas"]
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, panels = plt.subplots(
            1, len(betas) + 1, figsize=(6 * len(betas) + 7, 5.8), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for axis, beta in zip(panels[0], betas, strict=False):
            _curves(axis, lines, f"beta {beta:g}")
            if axis is not panels[0][0]:
                axis.sharey(panels[0][0])
        _ends(panels[0][-1], lines)
        for axis in panels[0]:
            unadorned(axis)
        figure.savefig(path, dpi=100)
        plt.close(figure)
    return f"wrote {path}"


def _kind(line: dict[str, Any]) -> str:
    name: str = line["name"]
    return name.partition(", beta")[0]


def _curves(axis: Any, lines: list[dict[str, Any]], beta: str) -> None:
    """Draw the mean over seeds with its 95% confidence interval."""
    for line in lines:
        if not line["name"].endswith(beta) and line["name"] != "no KL":
            continue
        steps = [int(step) for step in line["curve"]]
        means = [mean for mean, _ in line["curve"].values()]
        halves = [half if math.isfinite(half) else 0 for _, half in line["curve"].values()]
        color = COLORS[_kind(line)]
        axis.plot(steps, means, color=color, linewidth=2, marker="o", markersize=4,
                  label=_kind(line))  # fmt: skip
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set_title(f"held-out accuracy, {beta}", loc="left")
    axis.set_xlabel("step")
    axis.legend(frameon=False, fontsize=11, loc="best")


def _ends(axis: Any, lines: list[dict[str, Any]]) -> None:
    """Draw one dot per seed, and the mean with its confidence interval."""
    for place, line in enumerate(lines):
        color, (mean, half) = COLORS[_kind(line)], line["held_out"]
        finals = line["finals"]
        axis.plot(finals, [place] * len(finals), "o", color=color, markersize=6, alpha=0.5)
        axis.errorbar(mean, place, xerr=half if math.isfinite(half) else 0, color=color,
                      capsize=4, linewidth=2)  # fmt: skip
        axis.annotate(f"{mean:.3f}", (mean, place), (0, 8), textcoords="offset points",
                      ha="center", color=color, fontweight="bold", fontsize=11)  # fmt: skip
    labels = [line["name"].replace(", bucket", ",\nbucket").replace(" anchor, p", " anchor,\np")
              for line in lines]  # fmt: skip
    axis.set_yticks(range(len(lines)), [label.replace(" anchor, k", " anchor,\nk")
                                        for label in labels], fontsize=10)  # fmt: skip
    axis.set_ylim(len(lines) - 0.4, -0.7)
    axis.margins(x=0.1)
    axis.set_title("after the last step", loc="left")
    axis.set_xlabel("held-out accuracy")
