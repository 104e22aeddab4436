"""Panels of curves, bars and sparklines as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from clients.jobs.plots.panels import Curve, Panel, choose_ticks, smooth_curve
from clients.jobs.plots.stages import Bar, Stage

WIDTH, HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 30


def panel_svg(panel: Panel) -> str:
    """Return a `<figure>` with title, legend and plot. All text is escaped."""
    legend = "".join(
        f'<span class="key c{curve.number % 6}">{escape(curve.label)}</span>'
        for curve in panel.curves
        if curve.label != panel.title
    )
    scale = " <small>log scale</small>" if panel.log else ""
    elements = [*_render_grid(panel), *(_render_curve(panel, curve) for curve in panel.curves)]
    return (
        f"<figure><figcaption>{escape(panel.title)}{scale}</figcaption>"
        f'<p class="keys">{legend}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">'
        f"{''.join(elements)}</svg></figure>"
    )


def bars_svg(stages: Sequence[Stage], bars: Sequence[Bar]) -> str:
    """Return an `<svg>` of stacked bars: the mean seconds of a step, by stage.

    `bars` has at least one bar.
    """
    highest = max(sum(bar.seconds) for bar in bars)
    ends = [(bars[0].first - 0.5, 0.0), (bars[-1].last + 0.5, highest or 1.0)]
    panel = Panel("seconds a step", [Curve("", 0, ends, False)], False)
    rectangles = "".join(_render_bar(panel, stages, bar) for bar in bars)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="seconds a step, by stage">'
        f"{''.join(_render_grid(panel))}{rectangles}</svg>"
    )


def sparkline_svg(curve: Curve) -> str:
    """Return a small `<svg>` of a curve, without axes and labels."""
    panel = Panel("", [curve], False)
    first_step, last_step, _, _ = panel.spans()
    heights = panel.heights([y for _, y in curve.points])
    path = "L".join(
        f"{120 * (x - first_step) / (last_step - first_step):.1f} {20 - 18 * height:.1f}"
        for (x, _), height in zip(smooth_curve(curve.points), heights, strict=True)
    )
    return (
        f'<svg class="spark" viewBox="0 0 120 22" role="img" aria-label="{escape(curve.label)}">'
        f'<title>{escape(curve.label)}</title><path class="line c0" d="M{path}"/></svg>'
    )


def _render_bar(panel: Panel, stages: Sequence[Stage], bar: Bar) -> str:
    (left, _), (right, _) = _pixel_positions(panel, [(bar.first - 0.5, 0), (bar.last + 0.5, 0)])
    gap = min(1.5, (right - left) / 8)
    base_seconds, parts = 0.0, []
    for stage, seconds in zip(stages, bar.seconds, strict=True):
        (_, bottom), (_, top) = _pixel_positions(
            panel, [(bar.first, base_seconds), (bar.first, base_seconds + seconds)]
        )
        base_seconds += seconds
        steps = f"step {bar.first}" if bar.first == bar.last else f"steps {bar.first}-{bar.last}"
        parts.append(
            f'<rect class="c{stage.color}" x="{left + gap:.1f}" y="{top:.1f}"'
            f' width="{right - left - 2 * gap:.1f}" height="{bottom - top:.1f}">'
            f"<title>{steps}, {escape(stage.label)}: {seconds:.3g} s</title></rect>"
        )
    return "".join(parts)


def _render_grid(panel: Panel) -> list[str]:
    first_step, last_step, low, high = panel.spans()
    lines = []
    for value in choose_ticks(low, high, log=panel.log):
        y = _pixel_y(panel.heights([value])[0])
        lines.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    bottom = HEIGHT - _BOTTOM
    for value in choose_ticks(first_step, last_step, log=False, max_ticks=6):
        x = _pixel_x((value - first_step) / (last_step - first_step))
        lines.append(f'<path class="rule" d="M{x:.1f} {bottom}v4"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{value:.6g}</text>')
    lines.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>')
    return lines


def _render_curve(panel: Panel, curve: Curve) -> str:
    color = f"c{curve.number % 6}"
    if curve.held_out:
        return _render_line(panel, curve.points, color) + "".join(
            f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>step {step:g}: {value:.4g}</title></circle>"
            for (x, y), (step, value) in zip(
                _pixel_positions(panel, curve.points), curve.points, strict=True
            )
        )
    smooth = smooth_curve(curve.points)
    faint = (
        _render_line(panel, curve.points, f"faint {color}") if smooth != list(curve.points) else ""
    )
    return faint + _render_line(panel, smooth, color)


def _render_line(panel: Panel, points: Sequence[tuple[float, float]], classes: str) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in _pixel_positions(panel, points))
    return f'<path class="line {classes}" d="M{path}"/>'


def _pixel_positions(
    panel: Panel, points: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    first_step, last_step, _, _ = panel.spans()
    heights = panel.heights([y for _, y in points])
    return [
        (_pixel_x((x - first_step) / (last_step - first_step)), _pixel_y(height))
        for (x, _), height in zip(points, heights, strict=True)
    ]


def _pixel_x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _pixel_y(height: float) -> float:
    return _TOP + (1 - height) * (HEIGHT - _TOP - _BOTTOM)
