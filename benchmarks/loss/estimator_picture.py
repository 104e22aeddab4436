"""Draws docs/estimators.png: bars of bias and standard deviation by tail mode, k and direction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = {
    "none": "#bdc1c6",
    "bucket": "#5f6368",
    "published": "#d93025",
    "sampled": "#f9ab00",
    "bucket+sampled": "#1a73e8",
    "bucket+draws": "#9334e6",
    "bucket+teacher_samples": "#188038",
}
PANELS = (
    ("gradient_bias", "gradient bias / |grad KL|"),
    ("gradient_sd", "gradient standard deviation / |grad KL|"),
)
ZERO = 1e-12


def draw(rows: Sequence[dict[str, Any]], tails: Sequence[str], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.titlesize": 13, "hatch.linewidth": 0.5}):
        figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
        for line, direction in zip(axes, ("reverse", "forward"), strict=True):
            for axis, (name, title) in zip(line, PANELS, strict=True):
                mine = [row for row in rows if row["direction"] == direction]
                _panel(axis, mine, tails, name)
                axis.set_title(f"{direction} KL: {title}", loc="left")
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[tail]) for tail in tails]
        figure.legend(handles, tails, loc="outside lower center", ncols=len(tails), frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"


def _panel(axis: Any, rows: Sequence[dict[str, Any]], tails: Sequence[str], name: str) -> None:
    """Draw groups of bars by k, one bar per tail mode. A value of zero is written as 0."""
    sizes = sorted({row["k"] for row in rows})
    present = [tail for tail in tails if any(row["tail"] == tail for row in rows)]
    width = 0.86 / len(present)
    for place, tail in enumerate(present):
        values = {row["k"]: row[name] for row in rows if row["tail"] == tail}
        where = [i + (place - (len(present) - 1) / 2) * width for i in range(len(sizes))]
        axis.bar(where, [values[k] for k in sizes], width * 0.92, color=COLORS[tail])
        for x, k in zip(where, sizes, strict=True):
            if values[k] < ZERO:
                axis.annotate(
                    "0", (x, 0), (0, 2), textcoords="offset points", ha="center",
                    color=COLORS[tail], fontweight="bold",
                )  # fmt: skip
    masses = {row["k"]: row["student_tail_mass"] for row in rows}
    axis.set_xticks(range(len(sizes)), [f"k = {k}\ntail mass {masses[k]:.2f}" for k in sizes])
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.grid(True, color="#e8eaed")
    axis.set_axisbelow(True)
