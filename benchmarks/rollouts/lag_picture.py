"""Draws docs/lag.png: the held-out KL after training against the lag."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import unadorned

WAYS = ((True, "with p / mu, as in a job", "#1a73e8"), (False, "without", "#d93025"))


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw a panel for each learning rate and return a message."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({run["learning_rate"] for run in result["runs"]})
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, axes = plt.subplots(
            1, len(rates), figsize=(5 * len(rates), 4.5), layout="constrained", squeeze=False,
            sharey=True,
        )  # fmt: skip
        for axis, rate in zip(axes[0], rates, strict=True):
            _panel(axis, [run for run in result["runs"] if run["learning_rate"] == rate])
            axis.set_title(f"learning rate {rate:g}", loc="left")
            axis.set_xlabel("lag in steps")
        axes[0][0].set_ylabel(f"exact KL held out, after {result['steps']} steps")
        handles = [plt.Line2D([], [], color=color, marker="o") for _, _, color in WAYS]
        figure.legend(
            handles, [name for _, name, _ in WAYS],
            loc="outside lower center", ncols=len(WAYS), frameon=False,
        )  # fmt: skip
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"


def _panel(axis: Any, runs: list[dict[str, Any]]) -> None:
    """Draw a point per run, and a line through the means; lags are at equal distances."""
    lags = sorted({run["lag"] for run in runs})
    for weighted, _, color in WAYS:
        ends = [
            [run["after"] for run in runs if (run["lag"], run["weighted"]) == (lag, weighted)]
            for lag in lags
        ]
        shift = -0.06 if weighted else 0.06
        for place, of_lag in enumerate(ends):
            axis.plot([place + shift] * len(of_lag), of_lag, "o", color=color, alpha=0.5, ms=5)
        means = [(place + shift, statistics.mean(of)) for place, of in enumerate(ends) if of]
        axis.plot(*zip(*means, strict=True), color=color, lw=2)
    axis.set_xticks(range(len(lags)), lags)
    unadorned(axis)
