"""HTML of a job for the output of a notebook.

It shows the state, progress, curves, configuration and samples of the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pydantic import ValidationError

from clients.config.kinds import parse_job
from clients.config.summary import JobSummary, summary_of
from clients.html import table_html
from clients.jobs.job import TERMINAL, Job
from clients.jobs.plots.panels import panels_of
from clients.jobs.plots.svg import panel_svg, sparkline_svg
from clients.jobs.record import JobRecord
from clients.jobs.results import newest_result, verdict_of

_FEW_SAMPLES = 3


def job_markup(record: JobRecord) -> Iterator[str]:
    """Yield the HTML of a short view of a job: state, result and configuration.

    All text is escaped.
    """
    yield from head_markup(record.job, f"{newest_result(record.job)} {_spark(record)}")
    if verdict := verdict_of(record.job, record.points):
        yield f"<p>{escape(verdict)}</p>"
    if (summary := _summarize(record.job)) is None:
        return
    yield f'<p class="soft">{escape(str(summary))}</p>'
    if keys := summary.changed_keys:
        table = table_html((key, _format_value(value)) for key, value in keys)
        title = f"{len(keys)} keys differ from their defaults"
        yield f"<details><summary>{title}</summary>{table}</details>"


def live_markup(
    record: JobRecord, facts: Iterable[tuple[str, str]], metrics: Sequence[str]
) -> Iterator[str]:
    """Yield the HTML of the live view of a job: progress, curves and some samples.

    - `facts`: (label, text) pairs about the newest step
    - `metrics`: names of the metrics to draw as curves; empty means those of `distill plot`
    """
    yield from head_markup(
        record.job, " &middot; ".join(f"{escape(name)} {escape(text)}" for name, text in facts)
    )
    recorded_metrics = [metric for metric in metrics if metric in record.metrics]
    if recorded_metrics or (record.points and not metrics):
        figures = "".join(panel_svg(panel) for panel in panels_of([record], recorded_metrics))
        yield f'<div class="curves">{figures}</div>'
    samples = record.notes.samples[:_FEW_SAMPLES]
    yield from samples_markup(record.notes.samples_step, samples)


def head_markup(job: Job, facts: str) -> Iterator[str]:
    """Yield the HTML of the name, state and progress of a job.

    `facts`: HTML of the newest values.
    """
    attempts = f", attempt {job.attempt}" if job.attempt > 1 else ""
    yield (
        f'<p><b>{escape(job.name)}</b> <span class="soft">{escape(job.id)},'
        f" {escape(job.kind)}</span></p>"
    )
    yield f"<p>{state_markup(job)}</p>"
    if job.max_steps:
        share = min(1.0, job.step / job.max_steps)
        yield f'<div class="bar"><div style="width:{share:.1%}"></div></div>'
    steps = f"step {job.step} of {job.max_steps or '?'}{attempts}"
    yield f'<p class="soft">{steps} &middot; {facts}</p>'


def state_markup(job: Job) -> str:
    """Return the HTML of the state and its reason. Until the job ends, the phase is added."""
    phase = f" {escape(job.phase)}" if job.phase and job.state not in TERMINAL else ""
    reason = f": {escape(job.reason)}" if job.reason else ""
    return f'<span class="verdict {job.state.lower()}">{job.state}</span>{phase}{reason}'


def samples_markup(step: int, samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the HTML of sampled answers, one card per answer.

    `step`: the step of the evaluation that sampled them.
    """
    if samples:
        cards = "".join(f'<div class="card">{values_markup(sample)}</div>' for sample in samples)
        yield f'<h2>Samples of step {step}</h2><div class="samples">{cards}</div>'


def values_markup(values: Mapping[str, Any]) -> str:
    """Return an HTML table of names and values, without the values that are None."""
    return table_html(
        (str(name), _format_value(value)) for name, value in values.items() if value is not None
    )


def _summarize(job: Job) -> JobSummary | None:
    """Return the summary of the job's configuration, or None.

    None: the job comes from a list and has no configuration, or this version cannot read it.
    """
    try:
        return summary_of(parse_job(job.config_json)) if job.config_json else None
    except ValidationError:
        return None


def _spark(record: JobRecord) -> str:
    if not record.points:
        return ""
    panels = panels_of([record])
    panel = next((panel for panel in panels if panel.title.startswith("KL")), panels[0])
    return sparkline_svg(panel.curves[0])


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
