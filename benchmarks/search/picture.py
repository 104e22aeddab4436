"""Draws docs/search.png: exact match by step, and with and without the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import BLACK, BLUE, GREY, RED, draw_figure, style_axis


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""

    def plot(_: Any, axes: Any) -> None:
        curve_axis, final_axis = axes[0]
        _draw_curve(curve_axis, result)
        _draw_final_values(final_axis, result["examined"])
        for axis in axes[0]:
            style_axis(axis)

    return draw_figure(path, plot, columns=2, size=(13, 5))


def _draw_curve(axis: Any, result: dict[str, Any]) -> None:
    rewards = result["rewards"]
    axis.plot(range(1, len(rewards) + 1), rewards, color=GREY, linewidth=1,
              label="answers sampled in training")  # fmt: skip
    steps = [int(step) for step in result["curve"]]
    axis.plot(steps, list(result["curve"].values()), color=BLUE, linewidth=2, marker="o",
              label="likeliest answers, people never met")  # fmt: skip
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("step")
    axis.set_title("exact match", loc="left")
    axis.legend(frameon=False, loc="center right")


def _draw_final_values(axis: Any, examinations: dict[str, Any]) -> None:
    for position, (name, metrics) in enumerate(examinations.items()):
        share = metrics["exact_match"]
        color = BLUE if name.startswith("after") else GREY
        axis.barh(position, share, color=RED if "nothing" in name else color, height=0.6)
        axis.annotate(f"{share:.3f}  ({metrics['queries']:.2f} queries)", (share, position), (6, 0),
                      textcoords="offset points", va="center", color=BLACK)  # fmt: skip
    axis.set_yticks(range(len(examinations)), [name.replace(", ", ",\n") for name in examinations])
    axis.set_ylim(len(examinations) - 0.5, -0.5)
    axis.set_xlim(0, 1.6)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.set_title("exact match on people never met", loc="left")
