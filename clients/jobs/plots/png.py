"""Writes panels as a picture, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.jobs.plots.panels import Panel, choose_ticks, smooth_curve
from protos.errors import InvalidInput
from protos.extras import install_command

SUFFIXES = (".png", ".svg", ".pdf")
COLORS = ("#2462c9", "#c2570c", "#1a7f4b", "#a83289", "#7a6a00", "#4b5563")


def save_picture(path: Path, panels: Sequence[Panel], jobs: Sequence[str]) -> None:
    """Write panels to `path` as .png, .svg or .pdf. The suffix of `path` selects the format.

    `jobs`: ids of the jobs with curves; the number of a curve is the index of its job. Creates the
    directory if it is missing. Raises InvalidInput for another suffix, or if matplotlib is not
    installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        suffixes = ", ".join(SUFFIXES)
        message = f"{path} does not end in one of {suffixes}"
        raise InvalidInput(message, field="-o", hint="give a .png file")
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise InvalidInput(
            "a picture needs matplotlib, which is not installed",
            field="-o",
            hint=f"{install_command('plot')}, or omit -o",
        ) from error
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    # Figure and not pyplot, which has global state and looks for a display.
    figure = Figure(figsize=(5.6 * columns, 3.3 * rows + 0.3), layout="constrained", dpi=150)
    for index, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, columns, index + 1), panel, legend=len(jobs) == 1)
    if len(jobs) == 1:
        figure.suptitle(jobs[0], fontsize=11)
    else:
        lines = [Line2D([], [], **_line_style(number)) for number in range(len(jobs))]
        figure.legend(lines, jobs, loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Any, panel: Panel, *, legend: bool) -> None:
    from matplotlib.ticker import NullLocator

    for curve in panel.curves:
        line_style = _line_style(curve.number)
        xs, ys = zip(*curve.points, strict=True)
        if curve.held_out:
            axes.plot(xs, ys, **line_style, marker="o", markersize=3.5, label=curve.label)
            continue
        smooth = smooth_curve(curve.points)
        if smooth != list(curve.points):
            axes.plot(xs, ys, **line_style, alpha=0.25, linewidth=0.8)
        axes.plot(xs, [y for _, y in smooth], **line_style, linewidth=1.5, label=curve.label)
    if panel.log:
        _, _, low, high = panel.spans()
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_yticks(
            marks := choose_ticks(low, high, log=True), [f"{mark:.4g}" for mark in marks]
        )
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and len(panel.curves) > 1:
        axes.legend(fontsize=8, frameon=False)


def _line_style(number: int) -> dict[str, Any]:
    line = ("-", "--", ":")[number // len(COLORS) % 3]
    return {"color": COLORS[number % len(COLORS)], "linestyle": line}
