"""`distill teacher`: inspect a teacher directly, and list those that a job server runs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from clients.cli.output import plain
from clients.cli.settings import settings_of
from clients.jobs.view import duration

COLUMNS = ("key", "state", "model", "engine", "address", "age", "attempt", "jobs", "reason")

app = typer.Typer(
    help="Inspect teachers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
AddressArgument = Annotated[
    str,
    typer.Argument(metavar="HOST:PORT", help="Address that distill-teacher prints when it starts."),
]


@app.callback()
def _teacher() -> None: ...


@app.command()
def info(context: typer.Context, address: AddressArgument) -> None:
    """Show a teacher's model, limits, load and counters."""
    # Importing gRPC takes 0.2 s: only the commands that need it do so.
    from clients.teacher.client import TeacherClient

    with TeacherClient(address) as client:
        facts, load = asdict(client.info()), asdict(client.load())
    for tier, (hits, misses) in load.pop("cache_tiers").items():
        load |= {f"cache_{tier}_hits": hits, f"cache_{tier}_misses": misses}
    record = {"address": address, **facts, **load}
    width = max(map(len, record))
    lines = (f"{key.ljust(width)}  {plain(str(value))}" for key, value in record.items())
    settings_of(context).output.result(record, "\n".join(lines))


@app.command()
def ls(context: typer.Context) -> None:
    """List the teachers that the job server runs for jobs with teacher.model."""
    settings = settings_of(context)
    with settings.client() as client:
        found = client.teachers()
    if not found and not settings.output.as_json:
        settings.output.say("the server runs no teacher")
        return
    rows = [asdict(one) for one in found]
    if not settings.output.as_json:
        now = time.time()
        rows = [
            {**row, "jobs": " ".join(row["jobs"]) or "-", "age": duration(now - row["since"])}
            for row in rows
        ]
    settings.output.table("teachers", rows, COLUMNS)
