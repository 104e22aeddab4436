"""`distill submit` and `distill watch`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.config_commands import print_values
from clients.cli.display import conclude, display
from clients.cli.output import Output
from clients.cli.progress import Progress
from clients.cli.settings import (
    JobArgument,
    JobFileArgument,
    NameOption,
    SetOption,
    overrides,
    settings_of,
)
from protos.errors import ExitCode

if TYPE_CHECKING:
    from clients.distill_client import DistillClient


def submit(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    name: NameOption = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Watch it.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the file and print what it means.")
    ] = False,
) -> ExitCode:
    """Hand a job to the server, and return at once."""
    from clients.config_file import load_job, localized

    settings = settings_of(context)
    output = settings.output
    file = load_job(job, overrides(sets, name))
    if dry_run:
        print_values(output, file)
        return ExitCode.OK
    with settings.client() as client:
        made = client.submit(localized(file.config), config_text=file.text)
        output.result(asdict(made), made.id)
        if follow:
            return watch_job(client, made.id, output)
    output.say(f"  distill watch {made.id}    how it fares")
    output.say(f"  distill logs -f {made.id}  what it prints")
    output.say(f"  distill cancel {made.id}   stop it after a checkpoint")
    return ExitCode.OK


def watch(context: typer.Context, job: JobArgument) -> ExitCode:
    """Follow a job until it is over. Ctrl-C stops the watching, not the job."""
    settings = settings_of(context)
    with settings.client() as client:
        return watch_job(client, client.get(job).id, settings.output)


def watch_job(client: DistillClient, job_id: str, output: Output) -> ExitCode:
    """Show a job until it is over. Ctrl-C detaches: the job goes on."""
    progress = Progress(job_id)
    try:
        with display(output, progress) as shown:
            for event in client.watch(job_id):
                progress.add(event)
                shown.show(event)
    except KeyboardInterrupt:
        output.say(f"job {job_id} goes on; distill watch {job_id}")
        return ExitCode.INTERRUPTED
    return conclude(output, progress)
