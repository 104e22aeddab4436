"""The common style of the benchmarks' pictures."""

from __future__ import annotations

from typing import Any


def unadorned(axis: Any) -> None:
    """Remove the frame except for the two axes, and draw a grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e8eaed")
    axis.set_axisbelow(True)
