"""`distill submit` and `distill watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.commands.config import print_values
from clients.cli.commands.jobs import facts_of
from clients.cli.live.display import conclude, display
from clients.cli.output import Output
from clients.cli.settings import (
    ClientSettings,
    JobArgument,
    JobFileArgument,
    NameOption,
    SetOption,
    overrides,
    settings_of,
)
from clients.jobs.view import JobView
from protos.errors import ExitCode, Unavailable

TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", min=0.001, help="Stop watching after this time, with exit code 7."
    ),
]

if TYPE_CHECKING:
    from clients.config.kinds import AnyJob
    from clients.jobs.client import DistillClient


def submit(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    name: NameOption = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Watch the job.")] = False,
    timeout: TimeoutOption = None,
    key: Annotated[
        str,
        typer.Option("--key", help="Submitting again with the same key returns the same job."),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Submit nothing: print all values of the job, and ask the server to check them.",
        ),
    ] = False,
) -> ExitCode:
    """Submit a job to the server and return at once."""
    from clients.config.file import load_job, localized

    settings = settings_of(context)
    output = settings.output
    file = load_job(job, overrides(sets, name))
    if dry_run:
        print_values(output, file)
        _ask_server(settings, localized(file.config))
        return ExitCode.OK
    with settings.client() as client:
        made = client.submit(
            localized(file.config), config_text=file.text, idempotency_key=key or None
        )
        output.result(facts_of(made), made.id)
        if follow:
            return watch_job(client, made.id, output, timeout)
    output.say(f"  distill watch {made.id}    show its progress")
    output.say(f"  distill logs -f {made.id}  show its log")
    output.say(f"  distill cancel {made.id}   stop it after a checkpoint")
    return ExitCode.OK


def _ask_server(settings: ClientSettings, config: AnyJob) -> None:
    """Raises the error that a submit would raise, except that the server may be unreachable."""
    try:
        with settings.client() as client:
            client.check(config)
    except Unavailable as error:
        if error.field:  # the server did answer: the job's teacher is unreachable
            raise
        settings.output.say(f"checked the job file only: {error}")
    else:
        settings.output.say("the server would accept the job")


def watch(context: typer.Context, job: JobArgument, timeout: TimeoutOption = None) -> ExitCode:
    """Show the progress of a job until it ends. Ctrl-C stops the watching, not the job."""
    settings = settings_of(context)
    with settings.client() as client:
        return watch_job(client, client.get(job).id, settings.output, timeout)


def watch_job(
    client: DistillClient, job_id: str, output: Output, timeout: float | None = None
) -> ExitCode:
    """Show the progress of a job until it ends; return the exit code of its final state.

    Ctrl-C returns INTERRUPTED and the job continues. Raises TimedOut after `timeout` seconds.
    """
    progress = JobView(job_id)
    try:
        with display(output, progress) as shown:
            for event in client.watch(job_id, timeout=timeout):
                progress.add(event)
                shown.show(event)
    except KeyboardInterrupt:
        output.say(f"job {job_id} continues; to watch it again: distill watch {job_id}")
        return ExitCode.INTERRUPTED
    return conclude(output, progress)
