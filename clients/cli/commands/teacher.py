"""`distill teacher`: inspect a teacher, or list the teachers of a job server."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from clients.cli.settings import settings_of
from clients.jobs.view import duration
from protos.program.logs import plain

COLUMNS = (
    "key",
    "state",
    "model",
    "engine",
    "address",
    "age",
    "attempt",
    "load",
    "jobs",
    "reason",
)

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
def _group_options() -> None: ...


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
    """List the teachers that the job server runs."""
    settings = settings_of(context)
    with settings.client() as client:
        teachers = client.teachers()
    if not teachers and not settings.output.as_json:
        settings.output.say("the server runs no teacher")
        return
    rows = [asdict(teacher) for teacher in teachers]
    if not settings.output.as_json:
        now = time.time()
        rows = [
            {
                **row,
                "jobs": " ".join(row["jobs"]) or "-",
                "age": duration(now - row["since"]),
                "load": f"{row['active_streams']} streams, {row['queued_tokens']} tokens",
            }
            for row in rows
        ]
    settings.output.table("teachers", rows, COLUMNS)
