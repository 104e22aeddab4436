"""The report of a job: one HTML page with inline SVG, without scripts and external files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from clients.html import html_page
from clients.jobs.plots.notebook import samples_markup, values_markup
from clients.jobs.plots.panels import panels_of
from clients.jobs.plots.preview_html import render_preview
from clients.jobs.plots.stages import bars_of, stages_of
from clients.jobs.plots.svg import bars_svg, panel_svg
from clients.jobs.record import JobRecord
from clients.jobs.view import KL, describe_state, duration


def report_page(record: JobRecord) -> str:
    """Return the HTML page of the report of a job. All text of the job is escaped."""
    job = record.job
    body = [
        f"<h1>{escape(job.name)}</h1>",
        f'<p class="soft">{escape(job.id)}, {escape(job.kind)}</p>',
        _render_verdict(record),
        f'<div class="tiles">{"".join(_render_tiles(record))}</div>',
        *_render_curves(record),
        *_render_preview(record),
        *_render_timings(record),
        *samples_markup(record.notes.samples_step, record.notes.samples),
        _render_table("Configuration", dict(_flatten(json.loads(job.config_json or "{}")))),
        _render_table("Environment", record.notes.environment),
        f'<p class="soft">Made by distill report, {time.strftime("%Y-%m-%d %H:%M")}.</p>',
    ]
    return html_page(job.id, body)


def _render_verdict(record: JobRecord) -> str:
    job = record.job
    state = describe_state(job.state, job.phase)
    reason = f": {escape(job.reason)}" if job.reason else ""
    attempts = f", attempt {job.attempt}" if job.attempt > 1 else ""
    summary = f'<span class="verdict {job.state.lower()}">{escape(state)}</span>{reason}'
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


def _render_table(title: str, values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    return f'<h2>{escape(title)}</h2><div class="card">{values_markup(values)}</div>'


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
