"""Draw panels as text: with braille dots, or with letters if the encoding is not Unicode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from clients.cli.plots.panels import Panel, smoothed

HEIGHT = 13  # lines of a plot; odd, so that one is in the middle
_LABEL = 9
# Bits of the dots of a braille character, by [column][row] in its 2 x 4 grid.
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
# ANSI colors: blue, yellow, green, magenta, cyan, red.
_COLORS = (34, 33, 32, 35, 36, 31)

# (column, line) -> (braille dots, number of the curve)
_Cells = dict[tuple[int, int], tuple[int, int]]


def panel_text(panel: Panel, *, width: int, dots: bool, color: bool) -> str:
    """Return a panel as lines of at most `width` columns.

    `dots`: draw with braille characters, else with letters. Several curves are drawn with one
    letter each if colors or dots are not available.
    """
    curves = [
        curve if curve.held_out else replace(curve, points=smoothed(curve.points))
        for curve in panel.curves
    ]
    panel = replace(panel, curves=curves)
    columns = max(16, width - _LABEL - 2)
    letters = not dots or (len(panel.curves) > 1 and not color)
    cells = _drawn(panel, columns, (1, 1) if letters else (2, 4))
    first, last, low, high = panel.spans()
    middle = (low * high) ** 0.5 if panel.log else (low + high) / 2
    labels = {0: high, HEIGHT // 2: middle, HEIGHT - 1: low}
    lines = [f"{panel.title}{' (log)' if panel.log else ''}"]
    if len(panel.curves) > 1:
        lines += [
            f"  {_mark(curve.number, letters, color)} {curve.label}" for curve in panel.curves
        ]
    elif panel.curves[0].label != panel.title:
        lines[0] += f"  {panel.curves[0].label}"
    for row in range(HEIGHT):
        label = f"{labels[row]:.4g}" if row in labels else ""
        drawn = "".join(
            _cell(cells.get((column, row)), letters, color and not letters)
            for column in range(columns)
        )
        lines.append(f"{label:>{_LABEL}} |{drawn.rstrip()}")
    ends = f"{first:g}".ljust(columns - len(f"{last:g}")) + f"{last:g}"
    return "\n".join([*lines, f"{'':>{_LABEL}} +{'-' * columns}", f"{'step':>{_LABEL}}  {ends}"])


def _drawn(panel: Panel, columns: int, grid: tuple[int, int]) -> _Cells:
    across, down = grid
    width, height = columns * across, HEIGHT * down
    first, last, _, _ = panel.spans()
    cells: _Cells = {}
    for curve in panel.curves:
        heights = panel.heights([y for _, y in curve.points])
        dots = [
            (round((x - first) / (last - first) * (width - 1)), round((1 - h) * (height - 1)))
            for (x, _), h in zip(curve.points, heights, strict=True)
        ]
        for x, y in _joined(dots):
            where = (x // across, y // down)
            before = cells.get(where, (0, 0))[0]
            cells[where] = (before | _DOTS[x % 2][y % 4], curve.number)
    return cells


def _joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the dots and straight lines of dots between them."""
    found = list(dots[:1])
    for (x0, y0), (x1, y1) in pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [
            (round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps))
            for n in range(1, steps + 1)
        ]
    return found


def _cell(cell: tuple[int, int] | None, letters: bool, color: bool) -> str:
    if cell is None:
        return " "
    dots, place = cell
    return _letter(place) if letters else _painted(chr(_BRAILLE | dots), place, color)


def _mark(place: int, letters: bool, color: bool) -> str:
    return _letter(place) if letters else _painted(chr(_BRAILLE | 0x36), place, color)


def _letter(place: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[place % 26]


def _painted(text: str, place: int, color: bool) -> str:
    return f"\033[{_COLORS[place % len(_COLORS)]}m{text}\033[0m" if color else text
