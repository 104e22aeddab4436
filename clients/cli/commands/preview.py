"""`distill preview`: the training input of a job, token by token, before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.output import Output
from clients.cli.settings import JobFileArgument, SetOption, settings_of
from protos.errors import ExitCode, InvalidInput

if TYPE_CHECKING:
    from rich.text import Text

    from clients.data.preview import Preview, TokenView

# Two shades of each kind, so that neighbouring tokens differ.
_STYLES = {
    "context": ("bright_black", "white"),
    "learned": ("black on green", "black on bright_green"),
    "end": ("bold white on blue", "bold white on blue"),
    "sampled": ("black on yellow", "black on yellow"),
    "hidden": ("dim italic", "dim italic"),
}
# Without colours.
_BRACKETS = {"learned": "[]", "end": "[]", "sampled": "<>", "hidden": "()"}
_LEGEND = (
    ("context", "read, not learned"),
    ("learned", "learned"),
    ("end", "learned end of an answer"),
    ("sampled", "written by the student"),
)


def preview(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    records: Annotated[int, typer.Option(min=1, max=100, help="Number of records to show.")] = 5,
    page: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Write an HTML page instead.")
    ] = None,
) -> ExitCode:
    """Show the training input of a job, token by token, before training.

    The command reads records as the training program does. The command shows the input of the
    student and, if the job has a teacher, the input of the teacher: learned tokens, context, end
    tokens, and text that is missing from the input. The exit code is 0 also if the job would fail.
    The command counts the skipped records in a sample of 1,000 records of each data set. No teacher
    and no GPU is needed.
    """
    from clients.config.file import load_job
    from clients.jobs.plots.preview_html import preview_page
    from clients.local.preview import preview as preview_of

    output = settings_of(context).output
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"{page} is not an HTML file", field="-o", hint="give a name that ends in .html"
        )
    config = load_job(job, sets or []).config
    try:
        document = preview_of(config, records=records, quiet=output.quiet)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(preview_page(config.name, document), encoding="utf-8")
        output.result({"path": str(page)}, str(page))
    elif output.as_json:
        print(document.to_json().strip())
    else:
        _print_preview(document, output)
    return ExitCode.OK


def _print_preview(preview: Preview, output: Output) -> None:
    from rich.text import Text

    console = output.console(stderr=False)
    is_colored = console.color_system is not None and output.color
    for warning in preview.warnings:
        console.print(Text(f"! {warning}", style="bold red"))
    if not preview.warnings:
        console.print(Text("no problem found", style="green"))
    for name, text in preview.facts:
        console.print(Text(f"{name}: {text}", style="bright_black"))
    console.print(_legend_text(is_colored=is_colored))
    for record in preview.records:
        console.print()
        console.print(Text(record.where, style="bold"), Text(record.problem, style="bold red"))
        for view in record.views:
            console.print(Text(view.counts, style="bright_black"))
            console.print(_tokens_text(view, is_colored=is_colored))
        for part, text in record.lost:
            label = f"missing from the input, {part}:"
            console.print(Text(label, style="red"), Text(text, "strike"))


def _legend_text(*, is_colored: bool) -> Text:
    from rich.text import Text

    legend = Text("text as it is tokenized: ", "bright_black")
    for kind, label in _LEGEND:
        brackets = "" if is_colored else _BRACKETS.get(kind, "")
        style = _STYLES[kind][0] if is_colored else ""
        legend.append(f"{brackets[:1]}{label}{brackets[1:]}", style).append("  ")
    return legend


def _tokens_text(view: TokenView, *, is_colored: bool) -> Text:
    from rich.text import Text

    line = Text()
    for run in view.runs:
        brackets = "" if is_colored else _BRACKETS.get(run.kind, "")
        line.append(brackets[:1])
        for number, text in enumerate(run.texts):
            style = _STYLES[run.kind][number % 2] if is_colored else ""
            line.append(text.replace("\n", "\\n\n"), style)
        line.append(brackets[1:])
    return line
