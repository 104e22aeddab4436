"""The option `--version` of `distill`, `distill-server` and `distill-teacher`."""

from __future__ import annotations

from typing import Annotated

import typer


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from protos.extras import version

        typer.echo(f"distill-service {version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
]
