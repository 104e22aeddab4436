"""`distill plot` and `distill report`: results of jobs as text, a picture, or one HTML file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.completion import complete_job, complete_metric
from clients.cli.output import Output
from clients.cli.settings import ClientSettings, settings_of
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from clients.jobs.plots.panels import Panel
    from clients.jobs.record import JobRecord

JobOrRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job id, an unambiguous prefix of it, @last, or a run directory.",
        autocompletion=complete_job,
    ),
]
_MAX_COLUMNS = 100


def plot(
    context: typer.Context,
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB...",
            help="Job ids, unambiguous prefixes, @last, or run directories.",
            autocompletion=complete_job,
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--metric",
            metavar="METRIC",
            help="Plot this metric instead. Repeatable.",
            autocompletion=complete_metric,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("-o", metavar="FILE", help="Write a .png, .svg or .pdf file instead."),
    ] = None,
) -> None:
    """Plot loss, KL, reward and throughput by step, for one or several jobs."""
    from clients.jobs.plots.panels import panels_of

    settings = settings_of(context)
    output = settings.output
    records = records_of(settings, jobs)
    panels = panels_of(records, metrics or [])
    if picture is not None:
        from clients.jobs.plots.png import save_picture

        save_picture(picture, panels, [record.job.id for record in records if record.points])
        output.result({"path": str(picture)}, str(picture))
    elif output.as_json:
        output.result({"panels": [_panel_facts(panel) for panel in panels]}, "")
    else:
        print(_render_text(panels, output))


def records_of(
    settings: ClientSettings, jobs: Iterable[str], *, with_notes: bool = False
) -> list[JobRecord]:
    """Return the record of each job, read from its run directory or from the server.

    `jobs`: ids or run directories. The records have the same order, without duplicates.
    `with_notes`: the records also have the samples and the environment.
    """
    from clients.jobs.record import is_run_directory, record_of_run

    return [
        record_of_run(job) if is_run_directory(job) else _fetch_record(settings, job, with_notes)
        for job in dict.fromkeys(jobs)
    ]


def _fetch_record(settings: ClientSettings, name: str, with_notes: bool) -> JobRecord:
    with settings.client() as client:
        return client.get(name).record(with_notes=with_notes)


def _render_text(panels: Sequence[Panel], output: Output) -> str:
    from clients.jobs.plots.text import panel_text

    color = output.color and sys.stdout.isatty()
    dots = "utf" in (sys.stdout.encoding or "").lower()
    width = min(output.console(stderr=False).width, _MAX_COLUMNS)
    plots = (panel_text(panel, width=width, dots=dots, color=color) for panel in panels)
    return "\n\n".join(plots)


def _panel_facts(panel: Panel) -> dict[str, Any]:
    curves = [
        {
            "label": curve.label,
            "steps": [int(x) for x, _ in curve.points],
            "values": [y for _, y in curve.points],
        }
        for curve in panel.curves
    ]
    return {"title": panel.title, "log": panel.log, "curves": curves}


def report(
    context: typer.Context,
    job: JobOrRunArgument,
    page: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="HTML file, by default JOB.html.")
    ] = None,
) -> None:
    """Write a report of a job as one HTML file that opens without a network.

    The report contains the result, curves, timings, samples, configuration and environment.
    """
    from clients.jobs.plots.report_page import report_page

    settings = settings_of(context)
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"{page} is not an HTML file", field="-o", hint="give a name that ends in .html"
        )
    (record,) = records_of(settings, [job], with_notes=True)
    page = page or Path(f"{record.job.id}.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report_page(record), encoding="utf-8")
    settings.output.result({"path": str(page)}, str(page))
