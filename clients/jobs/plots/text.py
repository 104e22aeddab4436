"""Draws panels as text: with braille dots, or with letters if the encoding is not Unicode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from clients.jobs.plots.panels import Panel, smooth_curve

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
    """Return a panel as text. Its lines have at most `width` characters.

    `dots`: draw curves with braille characters, otherwise with letters. Without `color` or without
    `dots`, each of several curves is drawn with its own letter.
    """
    curves = [
        curve if curve.held_out else replace(curve, points=smooth_curve(curve.points))
        for curve in panel.curves
    ]
    panel = replace(panel, curves=curves)
    columns = max(16, width - _LABEL - 2)
    letters = not dots or (len(panel.curves) > 1 and not color)
    cells = _draw_curves(panel, columns, (1, 1) if letters else (2, 4))
    first_step, last_step, low, high = panel.spans()
    middle = (low * high) ** 0.5 if panel.log else (low + high) / 2
    labels = {0: high, HEIGHT // 2: middle, HEIGHT - 1: low}
    lines = [f"{panel.title}{' (log)' if panel.log else ''}"]
    if len(panel.curves) > 1:
        lines += [
            f"  {_render_mark(curve.number, letters, color)} {curve.label}"
            for curve in panel.curves
        ]
    elif panel.curves[0].label != panel.title:
        lines[0] += f"  {panel.curves[0].label}"
    for row in range(HEIGHT):
        label = f"{labels[row]:.4g}" if row in labels else ""
        text = "".join(
            _render_cell(cells.get((column, row)), letters, color and not letters)
            for column in range(columns)
        )
        lines.append(f"{label:>{_LABEL}} |{text.rstrip()}")
    ends = f"{first_step:g}".ljust(columns - len(f"{last_step:g}")) + f"{last_step:g}"
    return "\n".join([*lines, f"{'':>{_LABEL}} +{'-' * columns}", f"{'step':>{_LABEL}}  {ends}"])


def _draw_curves(panel: Panel, columns: int, grid: tuple[int, int]) -> _Cells:
    across, down = grid
    width, height = columns * across, HEIGHT * down
    first_step, last_step, _, _ = panel.spans()
    cells: _Cells = {}
    for curve in panel.curves:
        heights = panel.heights([y for _, y in curve.points])
        dots = [
            (
                round((x - first_step) / (last_step - first_step) * (width - 1)),
                round((1 - h) * (height - 1)),
            )
            for (x, _), h in zip(curve.points, heights, strict=True)
        ]
        for x, y in _connect_dots(dots):
            cell = (x // across, y // down)
            dots_so_far = cells.get(cell, (0, 0))[0]
            cells[cell] = (dots_so_far | _DOTS[x % 2][y % 4], curve.number)
    return cells


def _connect_dots(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the dots of a curve, and the dots of straight lines that connect them."""
    connected = list(dots[:1])
    for (x0, y0), (x1, y1) in pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        connected += [
            (round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps))
            for n in range(1, steps + 1)
        ]
    return connected


def _render_cell(cell: tuple[int, int] | None, letters: bool, color: bool) -> str:
    if cell is None:
        return " "
    dots, number = cell
    return _curve_letter(number) if letters else _colorize(chr(_BRAILLE | dots), number, color)


def _render_mark(number: int, letters: bool, color: bool) -> str:
    return _curve_letter(number) if letters else _colorize(chr(_BRAILLE | 0x36), number, color)


def _curve_letter(number: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[number % 26]


def _colorize(text: str, number: int, color: bool) -> str:
    return f"\033[{_COLORS[number % len(_COLORS)]}m{text}\033[0m" if color else text
