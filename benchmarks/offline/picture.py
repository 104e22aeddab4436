"""Draws docs/offline.png: the held-out KL of each training method by step, and its final value."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import unadorned

# In the order of `training.ways`.
COLORS = ("#9aa0a6", "#d93025", "#f9ab00", "#1a73e8", "#12b5cb", "#202124")


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    lines = result["learned"]["ways"]
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(14, 5.6), layout="constrained", width_ratios=(1.15, 1)
        )
        for way, color in zip(lines, COLORS, strict=False):
            _curve(left, way, color)
        left.set(xlabel="step", yscale="log")
        left.set_title("held-out KL(teacher||student), nats a token", loc="left")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("")
        left.legend(frameon=False, fontsize=11)
        _ends(right, lines)
        for axis in (left, right):
            unadorned(axis)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"


def _curve(axis: Any, way: dict[str, Any], color: str) -> None:
    """Draw the mean over seeds, with a band from the minimum to the maximum."""
    steps = [int(step) for step in way["curve"]]
    values = list(way["curve"].values())
    style = "--" if way["reference"] else "-"
    means = [statistics.mean(of) for of in values]
    axis.plot(steps, means, style, color=color, linewidth=2, marker="o", markersize=4,
              label=way["name"])  # fmt: skip
    axis.fill_between(steps, [min(of) for of in values], [max(of) for of in values],
                      color=color, alpha=0.2, linewidth=0)  # fmt: skip


def _ends(axis: Any, lines: list[dict[str, Any]]) -> None:
    """Draw one dot per seed, and write the mean."""
    for place, (way, color) in enumerate(zip(lines, COLORS, strict=False)):
        values = way["kl"]["seeds"]
        axis.plot(values, [place] * len(values), "o", color=color, markersize=8, alpha=0.7)
        axis.annotate(
            f"{way['kl']['mean']:.3f}", (way["kl"]["mean"], place), (0, 9),
            textcoords="offset points", ha="center", color=color, fontweight="bold",
        )  # fmt: skip
    axis.set_yticks(range(len(lines)), [way["name"].replace(", ", ",\n", 1) for way in lines])
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.set_title("after the last step, each seed", loc="left")
    axis.set_xlabel("held-out KL, nats a token")
