"""Draws docs/estimators.png: bars of bias and standard deviation by tail mode, k and direction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import TAIL_COLORS, add_color_legend, draw_figure, style_axis

PANELS = (
    ("gradient_bias", "gradient bias / |grad KL|"),
    ("gradient_sd", "gradient standard deviation / |grad KL|"),
)
ZERO = 1e-12


def draw(rows: Sequence[dict[str, Any]], tails: Sequence[str], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""

    def plot(figure: Any, axes: Any) -> None:
        for axes_row, direction in zip(axes, ("reverse", "forward"), strict=True):
            for axis, (metric, title) in zip(axes_row, PANELS, strict=True):
                panel_rows = [row for row in rows if row["direction"] == direction]
                _draw_panel(axis, panel_rows, tails, metric)
                axis.set_title(f"{direction} KL: {title}", loc="left")
        add_color_legend(figure, {tail: TAIL_COLORS[tail] for tail in tails})

    return draw_figure(path, plot, rows=2, columns=2, size=(13, 8.5))


def _draw_panel(
    axis: Any, rows: Sequence[dict[str, Any]], tails: Sequence[str], metric: str
) -> None:
    """Draw groups of bars by k, one bar per tail mode. A value of zero is written as 0."""
    ks = sorted({row["k"] for row in rows})
    panel_tails = [tail for tail in tails if any(row["tail"] == tail for row in rows)]
    width = 0.86 / len(panel_tails)
    for number, tail in enumerate(panel_tails):
        values = {row["k"]: row[metric] for row in rows if row["tail"] == tail}
        centers = [i + (number - (len(panel_tails) - 1) / 2) * width for i in range(len(ks))]
        axis.bar(centers, [values[k] for k in ks], width * 0.92, color=TAIL_COLORS[tail])
        for center, k in zip(centers, ks, strict=True):
            if values[k] < ZERO:
                axis.annotate(
                    "0", (center, 0), (0, 2), textcoords="offset points", ha="center",
                    color=TAIL_COLORS[tail], fontweight="bold",
                )  # fmt: skip
    masses = {row["k"]: row["student_tail_mass"] for row in rows}
    axis.set_xticks(range(len(ks)), [f"k = {k}\ntail mass {masses[k]:.2f}" for k in ks])
    style_axis(axis, grid="y")
