"""The table and the picture of `benchmarks.cross_tokenizer`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import format_table
from benchmarks.shared.pictures import BLACK, BLUE, GREY, draw_figure, style_axis

METRICS = {
    "bits": "bits a byte of the teacher's held-out answers",
    "cost": "log p - log q of the student's own answers, nats a byte",
}

# Names of losses, each with its learning rate.
Chosen = Sequence[tuple[str, float]]


def format_losses(result: dict[str, Any], chosen: Chosen) -> str:
    """Return the table of docs/pairs.md: mean over seeds, minimum to maximum in brackets."""
    before = result["before"]
    rows = [["(the student before)", "", f"{before['bits']:.3f}", f"{before['cost']:.3f}"]]
    for name, rate in chosen:
        cells = [_format_range(_select_values(result, name, rate, metric)) for metric in METRICS]
        rows.append([name, f"{rate:g}", *cells])
    return format_table(["loss", "learning rate", "bits per byte", "cost, nats per byte"], rows)


def draw(result: dict[str, Any], chosen: Chosen, path: Path) -> str:
    """Draw one dot per seed, and return a message. Without matplotlib, nothing is drawn."""

    def plot(_: Any, axes: Any) -> None:
        for axis, (metric, title) in zip(axes[0], METRICS.items(), strict=True):
            axis.axvline(result["before"][metric], color=BLACK, linestyle="--", linewidth=1)
            for position, (name, rate) in enumerate(chosen):
                values = _select_values(result, name, rate, metric)
                color = BLUE if name.startswith(("on-policy", "offline")) else GREY
                axis.plot(
                    values, [position] * len(values), "o", color=color, markersize=8, alpha=0.7
                )
                mean = statistics.mean(values)
                axis.annotate(f"{mean:.3f}", (mean, position), (0, 9), textcoords="offset points",
                              ha="center", color=color, fontweight="bold")  # fmt: skip
            axis.set_title(title, loc="left")
            axis.set_yticks(range(len(chosen)), [name for name, _ in chosen])
            axis.set_ylim(len(chosen) - 0.4, -0.7)
            axis.margins(x=0.12)
            style_axis(axis)

    return draw_figure(path, plot, columns=2, size=(14, 5.2), sharey=True)


def _select_values(result: dict[str, Any], name: str, rate: float, metric: str) -> list[float]:
    return [run[metric] for run in result["runs"] if (run["way"], run["rate"]) == (name, rate)]


def _format_range(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"
