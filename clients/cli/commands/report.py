"""`distill report`: a job's results in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clients.cli.commands.plot import JobOrRunArgument, records_of
from clients.cli.settings import settings_of
from protos.errors import InvalidInput


def report(
    context: typer.Context,
    job: JobOrRunArgument,
    page: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="HTML file, by default JOB.html.")
    ] = None,
) -> None:
    """Write a report of a job as one HTML file, which needs no network.

    It has the result, curves, timings, samples, configuration and environment of the job.
    """
    from clients.cli.plots.report_page import report_page

    settings = settings_of(context)
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"{page} is not an HTML file", field="-o", hint="give a name that ends in .html"
        )
    (record,) = records_of(settings, [job], with_notes=True)
    page = page or Path(f"{record.job.id}.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report_page(record))
    settings.output.result({"path": str(page)}, str(page))
