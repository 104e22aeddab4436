"""What the pictures of the benchmarks have in common."""

from __future__ import annotations

from typing import Any


def unadorned(axis: Any) -> None:
    """No frame but the two axes, and a grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e8eaed")
    axis.set_axisbelow(True)
