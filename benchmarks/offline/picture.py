"""Draws docs/offline.png: the held-out KL of each training method by step, and its final value."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import BLACK, BLUE, GREY, RED, YELLOW, draw_figure, style_axis

# In the order of `training.ways`.
COLORS = (GREY, RED, YELLOW, BLUE, "#12b5cb", BLACK)


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    methods = result["learned"]["ways"]

    def plot(_: Any, axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        curve_axis, final_axis = axes[0]
        for method, color in zip(methods, COLORS, strict=False):
            _draw_curve(curve_axis, method, color)
        curve_axis.set(xlabel="step", yscale="log")
        curve_axis.set_title("held-out KL(teacher||student), nats a token", loc="left")
        curve_axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
        curve_axis.yaxis.set_major_formatter("{x:g}")
        curve_axis.yaxis.set_minor_formatter("")
        curve_axis.legend(frameon=False, fontsize=11)
        _draw_final_values(final_axis, methods)
        for axis in axes[0]:
            style_axis(axis)

    return draw_figure(path, plot, columns=2, size=(14, 5.6), width_ratios=(1.15, 1))


def _draw_curve(axis: Any, method: dict[str, Any], color: str) -> None:
    """Draw the mean over seeds, with a band from the minimum to the maximum."""
    steps = [int(step) for step in method["curve"]]
    seed_values = list(method["curve"].values())
    style = "--" if method["reference"] else "-"
    means = [statistics.mean(values) for values in seed_values]
    axis.plot(steps, means, style, color=color, linewidth=2, marker="o", markersize=4,
              label=method["name"])  # fmt: skip
    axis.fill_between(steps, list(map(min, seed_values)), list(map(max, seed_values)),
                      color=color, alpha=0.2, linewidth=0)  # fmt: skip


def _draw_final_values(axis: Any, methods: list[dict[str, Any]]) -> None:
    """Draw one dot per seed, and write the mean."""
    for position, (method, color) in enumerate(zip(methods, COLORS, strict=False)):
        values = method["kl"]["seeds"]
        axis.plot(values, [position] * len(values), "o", color=color, markersize=8, alpha=0.7)
        axis.annotate(
            f"{method['kl']['mean']:.3f}", (method["kl"]["mean"], position), (0, 9),
            textcoords="offset points", ha="center", color=color, fontweight="bold",
        )  # fmt: skip
    labels = [method["name"].replace(", ", ",\n", 1) for method in methods]
    axis.set_yticks(range(len(methods)), labels)
    axis.set_ylim(len(methods) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.set_title("after the last step, each seed", loc="left")
    axis.set_xlabel("held-out KL, nats a token")
