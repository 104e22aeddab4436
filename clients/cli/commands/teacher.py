"""Commands about a teacher, which is asked directly: no job server is needed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from clients.cli.output import plain
from clients.cli.settings import settings_of

app = typer.Typer(
    help="Ask a running teacher.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
AddressArgument = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="As distill-teacher printed it.")
]


@app.callback()
def _teacher() -> None: ...


@app.command()
def info(context: typer.Context, address: AddressArgument) -> None:
    """Print what a teacher is, and what it has done."""
    # gRPC costs 0.2 s to import: only the commands that need it pay.
    from clients.teacher.client import TeacherClient

    with TeacherClient(address) as client:
        facts, load = asdict(client.info()), asdict(client.load())
    for tier, (hits, misses) in load.pop("cache_tiers").items():
        load |= {f"cache_{tier}_hits": hits, f"cache_{tier}_misses": misses}
    record = {"address": address, **facts, **load}
    width = max(map(len, record))
    lines = (f"{key.ljust(width)}  {plain(str(value))}" for key, value in record.items())
    settings_of(context).output.result(record, "\n".join(lines))
