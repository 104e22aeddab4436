"""Draws docs/search.png: exact match by step, and with and without the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import unadorned

LEARNED, GONE, TEXT = "#1a73e8", "#d93025", "#202124"


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw the picture and return a message. Without matplotlib, nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, (curve, ends) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
        _curve(curve, result)
        _ends(ends, result["examined"])
        for axis in (curve, ends):
            unadorned(axis)
        figure.savefig(path, dpi=100)
        plt.close(figure)
    return f"wrote {path}"


def _curve(axis: Any, result: dict[str, Any]) -> None:
    rewards = result["rewards"]
    axis.plot(range(1, len(rewards) + 1), rewards, color="#9aa0a6", linewidth=1,
              label="answers sampled in training")  # fmt: skip
    steps = [int(step) for step in result["curve"]]
    axis.plot(steps, list(result["curve"].values()), color=LEARNED, linewidth=2, marker="o",
              label="likeliest answers, people never met")  # fmt: skip
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("step")
    axis.set_title("exact match", loc="left")
    axis.legend(frameon=False, loc="center right")


def _ends(axis: Any, found: dict[str, Any]) -> None:
    for place, (name, values) in enumerate(found.items()):
        share = values["exact_match"]
        color = LEARNED if name.startswith("after") else "#9aa0a6"
        axis.barh(place, share, color=GONE if "nothing" in name else color, height=0.6)
        axis.annotate(f"{share:.3f}  ({values['queries']:.2f} queries)", (share, place), (6, 0),
                      textcoords="offset points", va="center", color=TEXT)  # fmt: skip
    axis.set_yticks(range(len(found)), [name.replace(", ", ",\n") for name in found])
    axis.set_ylim(len(found) - 0.5, -0.5)
    axis.set_xlim(0, 1.6)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.set_title("exact match on people never met", loc="left")
