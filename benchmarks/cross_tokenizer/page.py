"""The table and the picture of `benchmarks.cross_tokenizer`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.pictures import unadorned

OURS, THEIRS = "#1a73e8", "#9aa0a6"
METRICS = {
    "bits": "bits a byte of the teacher's held-out answers",
    "cost": "log p - log q of the student's own answers, nats a byte",
}

# Names of ways, each with its learning rate.
Chosen = Sequence[tuple[str, float]]


def table(found: dict[str, Any], chosen: Chosen) -> str:
    """Return the table of docs/pairs.md: mean over seeds, minimum to maximum in brackets."""
    lines = [
        "| learns from | learning rate | bits a byte | cost, nats a byte |",
        "|---|---|---|---|",
    ]
    before = found["before"]
    lines.append(f"| (the student before) | | {before['bits']:.3f} | {before['cost']:.3f} |")
    for name, rate in chosen:
        of_metrics = [_spread(_values(found, name, rate, metric)) for metric in METRICS]
        lines.append(f"| {name} | {rate:g} | {' | '.join(of_metrics)} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], chosen: Chosen, path: Path) -> str:
    """Draw one dot per seed, and return a message. Without matplotlib, nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, axes = plt.subplots(1, 2, figsize=(14, 5.2), layout="constrained", sharey=True)
        for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
            axis.axvline(found["before"][metric], color="#202124", linestyle="--", linewidth=1)
            for place, (name, rate) in enumerate(chosen):
                values = _values(found, name, rate, metric)
                color = OURS if name.startswith(("on-policy", "offline")) else THEIRS
                axis.plot(values, [place] * len(values), "o", color=color, markersize=8, alpha=0.7)
                mean = statistics.mean(values)
                axis.annotate(f"{mean:.3f}", (mean, place), (0, 9), textcoords="offset points",
                              ha="center", color=color, fontweight="bold")  # fmt: skip
            axis.set_title(title, loc="left")
            axis.set_yticks(range(len(chosen)), [name for name, _ in chosen])
            axis.set_ylim(len(chosen) - 0.4, -0.7)
            axis.margins(x=0.12)
            unadorned(axis)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return f"wrote {path}"


def _values(found: dict[str, Any], name: str, rate: float, metric: str) -> list[float]:
    return [one[metric] for one in found["runs"] if (one["way"], one["rate"]) == (name, rate)]


def _spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"
