"""Draws docs/lag.png: the held-out KL after training against the lag."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import BLUE, RED, add_color_legend, draw_figure, style_axis

# Weighted or not, label, color.
WEIGHTINGS = ((True, "with p / mu, as in a job", BLUE), (False, "without", RED))


def draw(result: dict[str, Any], path: Path) -> str:
    """Draw a panel for each learning rate and return a message."""
    rates = sorted({run["learning_rate"] for run in result["runs"]})

    def plot(figure: Any, axes: Any) -> None:
        for axis, rate in zip(axes[0], rates, strict=True):
            _draw_panel(axis, [run for run in result["runs"] if run["learning_rate"] == rate])
            axis.set_title(f"learning rate {rate:g}", loc="left")
            axis.set_xlabel("lag in steps")
        axes[0][0].set_ylabel(f"exact KL held out, after {result['steps']} steps")
        add_color_legend(figure, {label: color for _, label, color in WEIGHTINGS})

    return draw_figure(path, plot, columns=len(rates), size=(5 * len(rates), 4.5), sharey=True)


def _draw_panel(axis: Any, runs: list[dict[str, Any]]) -> None:
    """Draw a point per run, and a line through the means; lags are at equal distances."""
    lags = sorted({run["lag"] for run in runs})
    for weighted, _, color in WEIGHTINGS:
        shift = -0.06 if weighted else 0.06
        means = []
        for position, lag in enumerate(lags):
            kls = [run["after"] for run in runs if (run["lag"], run["weighted"]) == (lag, weighted)]
            axis.plot([position + shift] * len(kls), kls, "o", color=color, alpha=0.5, ms=5)
            if kls:
                means.append((position + shift, statistics.mean(kls)))
        axis.plot(*zip(*means, strict=True), color=color, lw=2)
    axis.set_xticks(range(len(lags)), lags)
    style_axis(axis)
