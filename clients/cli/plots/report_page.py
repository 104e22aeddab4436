"""The report of a job: one HTML page with inline SVG, without scripts and external files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from clients.cli.plots.panels import Curve, Panel, choose_ticks, panels_of, smooth_curve
from clients.cli.plots.preview_page import html_page, render_preview
from clients.cli.plots.stages import Bar, Stage, bars_of, stages_of
from clients.jobs.record import JobRecord
from clients.jobs.view import KL, duration

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
    """Return an `<svg>` of stacked bars (at least one): mean seconds of a step by stage."""
    highest = max(sum(bar.seconds) for bar in bars)
    ends = [(bars[0].first - 0.5, 0.0), (bars[-1].last + 0.5, highest or 1.0)]
    panel = Panel("seconds a step", [Curve("", 0, ends, False)], False)
    rectangles = "".join(_render_bar(panel, stages, bar) for bar in bars)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="seconds a step, by stage">'
        f"{''.join(_render_grid(panel))}{rectangles}</svg>"
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


def report_page(record: JobRecord) -> str:
    """Return the HTML page. All text of the job is escaped."""
    job = record.job
    body = [
        f"<h1>{escape(job.name)}</h1>",
        f'<p class="soft">{escape(job.id)}, {escape(job.kind)}</p>',
        _render_verdict(record),
        f'<div class="tiles">{"".join(_render_tiles(record))}</div>',
        *_render_curves(record),
        *_render_preview(record),
        *_render_timings(record),
        *_render_samples(record),
        _render_table("Configuration", dict(_flatten(json.loads(job.config_json or "{}")))),
        _render_table("Environment", record.notes.environment),
        f'<p class="soft">Made by distill report, {time.strftime("%Y-%m-%d %H:%M")}.</p>',
    ]
    return html_page(job.id, body)


def _render_verdict(record: JobRecord) -> str:
    job = record.job
    phase = f" ({escape(job.phase)})" if job.phase and job.state == "RUNNING" else ""
    reason = f": {escape(job.reason)}" if job.reason else ""
    attempts = f", attempt {job.attempt}" if job.attempt > 1 else ""
    summary = f'<span class="verdict {job.state.lower()}">{job.state}</span>{phase}{reason}'
    return f"<p>{summary}<br>step {job.step} of {job.max_steps}{attempts}</p>"


def _render_tiles(record: JobRecord) -> Iterator[str]:
    for label, metric, format_spec in (
        ("held-out KL, nats per token", "eval/kl", ".3f"),
        ("held-out KL, lower bound", "eval/kl_bound", ".3f"),
        ("held-out cross-entropy, nats per token", "eval/cross_entropy", ".3f"),
        ("held-out accuracy", "eval/accuracy", ".1%"),
        ("held-out reward", "eval/reward", ".3f"),
        ("perplexity", "eval/perplexity", ".3f"),
    ):
        series = record.series(metric)
        if series:
            first_value, last_value = series[0][1], series[-1][1]
            yield _render_tile(
                label, f"{first_value:{format_spec}} &rarr; {last_value:{format_spec}}"
            )
    for label, metric in (
        ("answers cut at method.max_new_tokens", "length/truncated"),
        ("updates skipped: gradient not finite", "grad_norm/skipped"),
    ):
        values = [value for _, value in record.series(metric)]
        if any(values):
            yield _render_tile(label, f"{sum(values) / len(values):.0%}")
    tokens = sum(value for _, value in record.series("tokens"))
    if tokens:
        has_teacher = not record.metrics.isdisjoint(KL.values())
        yield _render_tile("tokens scored" if has_teacher else "tokens learned", f"{tokens:,.0f}")
    seconds = sum(value for _, value in record.series("time/step"))
    if seconds:
        yield _render_tile("time in steps", duration(seconds))
        yield _render_tile("tokens per second", f"{tokens / seconds:,.0f}")
    job = record.job
    if job.ended_at and job.started_at:
        yield _render_tile("total time", duration(job.ended_at - job.started_at))


def _render_tile(label: str, value: str) -> str:
    return f'<div class="tile"><b>{value}</b><span class="soft">{escape(label)}</span></div>'


def _render_curves(record: JobRecord) -> list[str]:
    if not record.metrics:
        return ["<h2>Curves</h2><p>No metrics were recorded.</p>"]
    figures = "".join(panel_svg(panel) for panel in panels_of([record]))
    return [f'<h2>Curves</h2><div class="curves">{figures}</div>']


def _render_timings(record: JobRecord) -> list[str]:
    stages = stages_of(record)
    bars = bars_of(record, stages) if stages else []
    totals = bars_of(record, stages, max_bars=1)[0].seconds if bars else []
    total_seconds, count = sum(totals), len(record.series("time/step"))
    if not total_seconds:
        return []
    rows = "".join(
        f'<tr><th><span class="key c{stage.color}">{escape(stage.label)}</span></th>'
        f"<td>{seconds / total_seconds:.0%}, {duration(seconds * count)}</td></tr>"
        for stage, seconds in zip(stages, totals, strict=True)
    )
    figure = f"<figure><figcaption>seconds a step</figcaption>{bars_svg(stages, bars)}</figure>"
    table = f'<div class="card"><table>{rows}</table></div>'
    return [f'<h2>Time in steps</h2><div class="stages">{figure}{table}</div>']


def _render_preview(record: JobRecord) -> Iterator[str]:
    if record.notes.preview is not None:
        yield "<h2>What the job learns from</h2>"
        yield from render_preview(record.notes.preview)


def _render_samples(record: JobRecord) -> Iterator[str]:
    if record.notes.samples:
        cards = "".join(
            f'<div class="card">{_render_rows(sample)}</div>' for sample in record.notes.samples
        )
        yield f"<h2>Samples of step {record.notes.samples_step}</h2>"
        yield f'<div class="samples">{cards}</div>'


def _render_table(title: str, values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    return f'<h2>{escape(title)}</h2><div class="card">{_render_rows(values)}</div>'


def _render_rows(values: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(_format_value(value))}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{lines}</table>"


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
