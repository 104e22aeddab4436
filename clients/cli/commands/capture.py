"""`distill capture`: run a capture job on this machine, in the foreground."""

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
        str,
        typer.Option(
            metavar="DIR",
            help="Directory or URL (s3://, gs://) of the store, by default `store` in the run"
            " directory. An incomplete store of the same capture is completed.",
        ),
    ] = "",
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Capture only part I of N, from 0. `distill store merge` joins the parts.",
        ),
    ] = "",
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the teacher's engines on a Ray cluster.")
    ] = False,
    runs: Annotated[
        str, typer.Option(metavar="DIR", help="Parent directory of the run directory.")
    ] = "runs",
) -> ExitCode:
    """Capture a teacher's rows of a data set into a store.

    A job with method.type = "offline" trains from the store, without the teacher.

    An interrupted capture resumes at the first incomplete shard of the store: run the command again
    with the same --store, or use `distill run --resume DIR`.
    """
    capture_overrides = ["method.type=capture"]
    capture_overrides += [f"method.store={store}"] if store else []
    capture_overrides += [f"method.shard={shard}"] if shard else []
    capture_overrides += ["method.ray={}"] if ray else []
    return run_new(
        job, [*capture_overrides, *overrides(sets, name)], Path(runs), settings_of(context).output
    )
