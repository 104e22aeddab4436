"""The style of the benchmarks' pictures: fonts, colors, axes, legends and resolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESOLUTION = 110  # dots per inch
BLACK, DARK_GREY, GREY = "#202124", "#5f6368", "#9aa0a6"
BLUE, RED, YELLOW, GREEN = "#1a73e8", "#d93025", "#f9ab00", "#188038"
GRID_COLOR = "#e8eaed"
TAIL_COLORS = {
    "none": "#bdc1c6",
    "renormalised": "#12b5cb",
    "bucket": DARK_GREY,
    "published": RED,
    "sampled": YELLOW,
    "bucket+sampled": BLUE,
    "bucket+draws": "#9334e6",
    "bucket+teacher_samples": GREEN,
}


def draw_figure(
    path: Path,
    plot: Callable[[Any, Any], None],
    *,
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    **layout: Any,
) -> str:
    """Draw a picture in the common style, write it to `path` and return a message.

    plot: called with the figure and its axes [rows, columns]. size: inches. layout: other arguments
    of `matplotlib.pyplot.subplots`. Without matplotlib, nothing is drawn.
    """
    try:
        import matplotlib
    except ImportError:
        return "no picture: install the bench extra"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.titlesize": 13, "hatch.linewidth": 0.5}):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **layout
        )
        plot(figure, axes)
        figure.savefig(path, dpi=RESOLUTION)
        plt.close(figure)
    return f"wrote {path}"


def style_axis(axis: Any, grid: str = "both") -> None:
    """Remove the frame except for the two axes, and draw a grid (both, x or y) behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color=GRID_COLOR, axis=grid)
    axis.set_axisbelow(True)


def add_color_legend(figure: Any, colors: Mapping[str, str], columns: int | None = None) -> None:
    """Add a legend of labels and their colors below the figure."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, marker="o") for color in colors.values()]
    figure.legend(
        handles, list(colors), loc="outside lower center", ncols=columns or len(colors),
        frameon=False,
    )  # fmt: skip
