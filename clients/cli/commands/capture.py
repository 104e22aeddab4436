"""`distill capture`: a teacher's rows of a whole data set, on this machine, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clients.cli.commands.run import run_new
from clients.cli.settings import JobFileArgument, NameOption, SetOption, overrides, settings_of
from protos.errors import ExitCode


def capture(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    name: NameOption = "",
    store: Annotated[
        str, typer.Option(metavar="DIR", help="Where the rows go; goes on with what is there.")
    ] = "",
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Only part I, from 0, of N; for N machines.")
    ] = "",
    ray: Annotated[bool, typer.Option("--ray", help="Engines on a Ray cluster.")] = False,
    runs: Annotated[str, typer.Option(metavar="DIR", help="Where run directories go.")] = "runs",
) -> ExitCode:
    """Store a teacher's rows of a data set, to learn from without the teacher.

    Stopped by Ctrl-C, or killed, it goes on at the first file of the store that is not complete:
    with the same --store, or `distill run --resume DIR`.
    """
    chosen = ["method.type=capture"]
    chosen += [f"method.store={store}"] if store else []
    chosen += [f"method.shard={shard}"] if shard else []
    chosen += ["method.ray={}"] if ray else []
    return run_new(job, [*chosen, *overrides(sets, name)], Path(runs), settings_of(context).output)
