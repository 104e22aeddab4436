"""`distill submit` and `distill watch`: queue jobs on a server, and show their progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.commands.config import print_values
from clients.cli.commands.jobs import print_jobs
from clients.cli.live.display import conclude, display, notify_terminal
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
from protos.errors import ExitCode, InvalidInput, Unavailable

TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", min=0.001, help="Stop watching after this time, with exit code 7."
    ),
]

if TYPE_CHECKING:
    from clients.config.kinds import AnyJob
    from clients.jobs.client import DistillClient
    from clients.jobs.upload import UploadProgress


def submit(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    name: NameOption = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Watch the job.")] = False,
    timeout: TimeoutOption = None,
    key: Annotated[
        str,
        typer.Option("--key", help="A second submission with the same key returns the same job."),
    ] = "",
    upload: Annotated[
        bool,
        typer.Option(
            "--upload", help="Send the files of this machine that the job names to the server."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Submit nothing: print all values of the job, and ask the server to check them.",
        ),
    ] = False,
) -> ExitCode:
    """Submit the job or jobs of a file to the server, without waiting for their end."""
    from clients.config.file import load_jobs
    from clients.config.sweep import LABEL

    settings = settings_of(context)
    output = settings.output
    files = load_jobs(job, overrides(sets, name))
    configs = [file.config for file in files]
    if dry_run:
        print_values(output, files)
        if not (upload and _print_planned_uploads(output, configs)):
            _check_with_server(settings, configs)
        return ExitCode.OK
    with settings.client() as client:
        _print_server_paths(output, configs, are_absolute=upload)
        handles = client.submit_all(
            files, upload=upload, report=UploadReport(output), idempotency_key=key
        )
        print_jobs(output, handles, [handle.id for handle in handles])
        for handle in handles:
            if handle.phase.startswith("WAITING"):  # for a teacher
                output.say(handle.phase)
        if follow:
            return _watch_jobs(client, [handle.id for handle in handles], output, timeout)
    sweeps = [handle.labels[LABEL] for handle in handles if LABEL in handle.labels]
    for sweep in dict.fromkeys(sweeps):
        output.say(f"  distill table --label {quote(f'{LABEL}={sweep}')}    compare its jobs")
    for handle in (handle for handle in handles if LABEL not in handle.labels):
        output.say(f"  distill watch {handle.id}    show its progress")
        output.say(f"  distill logs -f {handle.id}  show its log")
        output.say(f"  distill cancel {handle.id}   stop it after a checkpoint")
    return ExitCode.OK


def _print_planned_uploads(output: Output, configs: Sequence[AnyJob]) -> bool:
    """Print the files that an upload would send. Return False if there are none."""
    from clients.jobs.upload import local_files

    _print_server_paths(output, configs, are_absolute=True)
    files = [local_file for config in configs for local_file in local_files(config)]
    for local_file in files:
        size = format_size(sum(path.stat().st_size for path in local_file.files.values()))
        count = len(local_file.files)
        output.say(f"{local_file.key}: {local_file.place}, {count} files, {size}, would be sent")
    if files:
        output.say(
            "checked the job file only: the server checks the job after it has received the files"
        )
    return bool(files)


def _print_server_paths(output: Output, configs: Sequence[AnyJob], *, are_absolute: bool) -> None:
    """Print the paths in the jobs that do not exist on this machine, and doubtful hub ids.

    Such a path is taken as a path of the server. A similar local path is printed with it. A hub id
    is doubtful if it may be a misspelt directory. `are_absolute`: True prints only absolute paths,
    False only relative paths, which the server looks up in its own working directory.
    """
    from clients.config.file import is_absolute
    from clients.jobs.upload import paths_of_server
    from clients.preflight.files import note_similar_directories

    place = "on this machine" if are_absolute else f"in {Path.cwd()}"
    missing_paths = [entry for config in configs for entry in paths_of_server(config)]
    for key, path, similar in dict.fromkeys(missing_paths):  # once for all jobs of a sweep
        if is_absolute(path) is are_absolute:
            suggestion = f"; did you mean {similar}?" if similar else ""
            output.say(f"{key}: {path} is not {place}: taken as a path of the server{suggestion}")
    notes = [note for config in configs for note in note_similar_directories(config)]
    for note in dict.fromkeys(notes):
        output.say(note)


def _check_with_server(settings: ClientSettings, configs: Sequence[AnyJob]) -> None:
    """Ask the server to check the jobs, and raise the error that a submission would raise.

    If the server cannot be reached, this function prints a message and raises no error.
    """
    try:
        with settings.client() as client:
            client.check(*configs)
    except Unavailable as error:
        if error.field:  # the server did answer: the job's teacher is unreachable
            raise
        settings.output.say(f"checked the job file only: {error}")
    else:
        description = "the job" if len(configs) == 1 else f"the {len(configs)} jobs"
        settings.output.say(f"the server would accept {description}")


def watch(
    context: typer.Context,
    job: JobArgument,
    timeout: TimeoutOption = None,
    notify: Annotated[
        bool, typer.Option("--notify", help="At the end, ring the bell and notify the desktop.")
    ] = False,
) -> ExitCode:
    """Show the progress of a job until it ends. Ctrl-C stops the watching, not the job."""
    settings = settings_of(context)
    if notify and not sys.stderr.isatty():
        hint = "a server reports ends of jobs with --on-end"
        raise InvalidInput("stderr is not a terminal", field="--notify", hint=hint)
    with settings.client() as client:
        job_id = client.get(job).id
        code = watch_job(client, job_id, settings.output, timeout)
        if notify and code is not ExitCode.INTERRUPTED:
            notify_terminal(f"{job_id} {client.get(job_id).state}")
    return code


def _watch_jobs(
    client: DistillClient, job_ids: Sequence[str], output: Output, timeout: float | None
) -> ExitCode:
    """Show the progress of jobs, one job after the other.

    Returns the first exit code that is not OK, or OK. Ctrl-C ends the command. `timeout`: maximum
    number of seconds for all jobs together.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    codes = []
    for number, job_id in enumerate(job_ids, start=1):
        seconds = None if deadline is None else max(0.001, deadline - time.monotonic())
        codes.append(watch_job(client, job_id, output, seconds))
        if codes[-1] is ExitCode.INTERRUPTED:
            if number < len(job_ids):
                output.say(f"{len(job_ids) - number} further jobs continue; see distill ls")
            return ExitCode.INTERRUPTED
    return next((code for code in codes if code is not ExitCode.OK), ExitCode.OK)


def watch_job(
    client: DistillClient, job_id: str, output: Output, timeout: float | None = None
) -> ExitCode:
    """Show the progress of a job until it ends. Return the exit code of its final state.

    Ctrl-C returns INTERRUPTED, and the job continues. Raises TimedOut after `timeout` seconds.
    """
    progress = JobView(job_id)
    try:
        with display(output, progress) as view:
            for event in client.watch(job_id, timeout=timeout):
                progress.add(event)
                view.show(event)
    except KeyboardInterrupt:
        output.say(f"job {job_id} continues; to watch the job again: distill watch {job_id}")
        return ExitCode.INTERRUPTED
    return conclude(output, progress)


_PAUSE_SECONDS = 10.0


class UploadReport:
    """Prints a line at the start and the end of an upload, and every 10 s during the upload."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._next_line_at = 0.0

    def __call__(self, progress: UploadProgress) -> None:
        """Print the progress at the start or end of an upload, or 10 s after the last line."""
        is_complete = progress.sent_bytes == progress.size
        if not (progress.begins or is_complete or time.monotonic() >= self._next_line_at):
            return
        self._next_line_at = time.monotonic() + _PAUSE_SECONDS
        text = f"{format_size(progress.sent_bytes)} of {format_size(progress.size)} sent"
        if progress.begins and is_complete:
            text = f"the server has its {format_size(progress.size)}"
        self._output.say(f"{progress.key}: {text}")


def format_size(count: int) -> str:
    """Format a number of bytes, such as `1.2 GB`."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
