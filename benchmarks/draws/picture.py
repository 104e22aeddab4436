"""Draws docs/draws.png (noise against bytes) and docs/draws-training.png (held-out KL)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loss.estimator_picture import COLORS

PANELS = (("bias", "bias / |gradient|"), ("sd", "standard deviation / |gradient|"))
LOWEST_BIAS = 1e-9


def draw_noise(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Draw bias and sd against the bytes of a row; return a message."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tails = [tail for tail in COLORS if any(row["tail"] == tail for row in rows)]
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained", sharex=True)
        for line, direction in zip(axes, ("reverse", "forward"), strict=True):
            mine = [row for row in rows if row["direction"] == direction and row["stratified"]]
            for axis, (name, title) in zip(line, PANELS, strict=True):
                for tail in tails:
                    points = _points(mine, tail, name)
                    if points:
                        axis.plot(*zip(*points, strict=True), "o-", color=COLORS[tail], lw=2)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.set_title(f"{direction} KL: {title}", loc="left")
                axis.grid(True, color="#e8eaed")
                axis.spines[["top", "right"]].set_visible(False)
            line[0].text(
                0.02, 0.03, "a mode that is not drawn here has no bias",
                transform=line[0].transAxes, color="#5f6368",
            )  # fmt: skip
        for axis in axes[1]:
            axis.set_xlabel("bytes a token, request and answer")
        handles = [plt.Line2D([], [], color=COLORS[tail], marker="o") for tail in tails]
        figure.legend(handles, tails, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"


def _points(rows: Sequence[dict[str, Any]], tail: str, name: str) -> list[tuple[float, float]]:
    """Return (bytes, value): of each number of ids, the split with the lowest sd."""
    budgets = {row["k"] for row in rows if row["tail"] == "none"}
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        ids = row["k"] + row["draws"]
        if row["tail"] != tail or ids not in budgets:
            continue
        if ids not in best or row["sd"] < best[ids]["sd"]:
            best[ids] = row
    points = [(row["bytes"], row[name]) for _, row in sorted(best.items())]
    return [point for point in points if point[1] > LOWEST_BIAS]


def draw_curves(result: dict[str, Any], path: Path) -> str:
    """Draw the held-out KL after the last step: a point per seed and a line at the mean."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last = str(result["steps"])
    ways = list(dict.fromkeys(run["way"] for run in result["runs"]))
    ends = {way: [run["kl"][last] for run in result["runs"] if run["way"] == way] for way in ways}
    ways.sort(key=lambda way: statistics.mean(ends[way]), reverse=True)
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
        for place, way in enumerate(ways):
            color = COLORS.get(way.split(",")[0], "#202124")
            axis.plot(ends[way], [place] * len(ends[way]), "o", color=color, alpha=0.6)
            mean = statistics.mean(ends[way])
            axis.plot([mean, mean], [place - 0.3, place + 0.3], color=color, lw=3)
        axis.axvline(statistics.mean(ends["exact"]), color="#202124", lw=0.8, ls=":")
        axis.set_yticks(range(len(ways)), ways)
        axis.set_xlabel(f"exact KL(student||teacher) per token after {last} steps, held out")
        axis.xaxis.grid(True, color="#e8eaed")
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"
