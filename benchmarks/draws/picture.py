"""Draws docs/draws.png (noise against bytes) and docs/draws-training.png (held-out KL)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import (
    BLACK,
    DARK_GREY,
    TAIL_COLORS,
    add_color_legend,
    draw_figure,
    style_axis,
)

PANELS = (("bias", "bias / |gradient|"), ("sd", "standard deviation / |gradient|"))
LOWEST_BIAS = 1e-9


def draw_noise(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Draw bias and sd against the bytes of a row; return a message."""
    tails = [tail for tail in TAIL_COLORS if any(row["tail"] == tail for row in rows)]

    def plot(figure: Any, axes: Any) -> None:
        for axes_row, direction in zip(axes, ("reverse", "forward"), strict=True):
            plotted_rows = [
                row for row in rows if row["direction"] == direction and row["stratified"]
            ]
            for axis, (metric, title) in zip(axes_row, PANELS, strict=True):
                for tail in tails:
                    points = _select_points(plotted_rows, tail, metric)
                    if points:
                        axis.plot(*zip(*points, strict=True), "o-", color=TAIL_COLORS[tail], lw=2)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.set_title(f"{direction} KL: {title}", loc="left")
                style_axis(axis)
            axes_row[0].text(
                0.02, 0.03, "a mode that is not drawn here has no bias",
                transform=axes_row[0].transAxes, color=DARK_GREY,
            )  # fmt: skip
        for axis in axes[1]:
            axis.set_xlabel("bytes a token, request and answer")
        add_color_legend(figure, {tail: TAIL_COLORS[tail] for tail in tails}, columns=4)

    return draw_figure(path, plot, rows=2, columns=2, size=(13, 9), sharex=True)


def _select_points(
    rows: Sequence[dict[str, Any]], tail: str, metric: str
) -> list[tuple[float, float]]:
    """Return (bytes, metric): of each number of ids, the split with the lowest sd."""
    budgets = {row["k"] for row in rows if row["tail"] == "none"}
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        ids = row["k"] + row["draws"]
        if row["tail"] != tail or ids not in budgets:
            continue
        if ids not in best or row["sd"] < best[ids]["sd"]:
            best[ids] = row
    points = [(row["bytes"], row[metric]) for _, row in sorted(best.items())]
    return [point for point in points if point[1] > LOWEST_BIAS]


def draw_final_kl(result: dict[str, Any], path: Path) -> str:
    """Draw the held-out KL after the last step: a point per seed and a line at the mean."""
    last_step = str(result["steps"])
    losses = list(dict.fromkeys(run["way"] for run in result["runs"]))
    final_kls = {
        loss: [run["kl"][last_step] for run in result["runs"] if run["way"] == loss]
        for loss in losses
    }
    losses.sort(key=lambda loss: statistics.mean(final_kls[loss]), reverse=True)

    def plot(_: Any, axes: Any) -> None:
        axis = axes[0][0]
        for position, loss in enumerate(losses):
            color = TAIL_COLORS.get(loss.split(",")[0], BLACK)
            kls = final_kls[loss]
            axis.plot(kls, [position] * len(kls), "o", color=color, alpha=0.6)
            mean = statistics.mean(kls)
            axis.plot([mean, mean], [position - 0.3, position + 0.3], color=color, lw=3)
        axis.axvline(statistics.mean(final_kls["exact"]), color=BLACK, lw=0.8, ls=":")
        axis.set_yticks(range(len(losses)), losses)
        axis.set_xlabel(f"exact KL(student||teacher) per token after {last_step} steps, held out")
        style_axis(axis, grid="x")

    return draw_figure(path, plot, size=(10, 5))
