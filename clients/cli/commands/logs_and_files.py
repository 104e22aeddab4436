"""`distill logs` and `distill pull`: the log and the files of a job."""

from __future__ import annotations

import json
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.commands.plot import JobOrRunArgument
from clients.cli.output import Output
from clients.cli.settings import JobArgument, settings_of
from protos.errors import ExitCode, InvalidInput
from protos.program.logs import escape_controls

if TYPE_CHECKING:
    from clients.jobs.artifacts import Checkpoint
    from clients.jobs.job import Job
    from clients.runs.metrics_file import Point


def logs(
    context: typer.Context,
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until the attempt ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", min=0, help="Print only the last N lines; 0 means all.")
    ] = 0,
    attempt: Annotated[
        int, typer.Option("--attempt", min=0, help="Number of the attempt; 0 means the newest.")
    ] = 0,
) -> ExitCode:
    """Print the log of a job's trainer."""
    settings = settings_of(context)
    try:
        with settings.client() as client:
            chunks = client.logs(job, attempt=attempt, follow=follow, tail_lines=lines)
            if settings.output.as_json:
                for line in decode_lines(chunks):
                    print(json.dumps({"line": line}), flush=True)
            elif sys.stdout.isatty():
                # A log must not control the terminal.
                decoder = getincrementaldecoder("utf-8")("replace")
                for chunk in chunks:
                    print(escape_controls(decoder.decode(chunk)), end="", flush=True)
            else:
                for chunk in chunks:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        if follow:
            settings.output.say(
                f"the job continues; to follow the log again: distill logs -f {job}"
            )
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def decode_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a byte stream as text.

    `chunks`: the bytes of the stream in pieces. A piece may end within a line or within a
    character.
    """
    partial_line = b""
    for chunk in chunks:
        *complete_lines, partial_line = (partial_line + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in complete_lines)
    if partial_line:
        yield partial_line.decode(errors="replace")


def pull(
    context: typer.Context,
    job: JobOrRunArgument,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="best|last|STEP",
            help="Checkpoint to download instead of the export; best: best by evaluation.",
        ),
    ] = "",
    destination: Annotated[
        str,
        typer.Option("-o", metavar="DIR", help="Directory to create; by default the job id."),
    ] = "",
) -> None:
    """Download the trained model of a job, or the store of a capture.

    The model is a Hugging Face directory. A checkpoint has its model in `model/`.
    """
    from clients.jobs.artifacts import pull_run
    from clients.jobs.record import is_run_directory, points_of, record_of_run

    settings = settings_of(context)
    pull_files = partial(_pull_files, settings.output, _parse_checkpoint(checkpoint), destination)
    if is_run_directory(job):
        record = record_of_run(job)
        pull_files(record.job, lambda: record.points, partial(pull_run, job))
        return
    with settings.client() as client:
        job_record = client.get(job)
        pull_files(
            job_record,
            lambda: points_of(client.history(job_record.id)),
            partial(client.pull, job_record.id),
        )


def _parse_checkpoint(checkpoint: str) -> Checkpoint | None:
    match checkpoint:
        case "":
            return None
        case "best" | "last":
            return checkpoint
    if not checkpoint.isdecimal() or int(checkpoint) == 0:
        raise InvalidInput(
            f"{checkpoint!r} is not a step", field="--checkpoint", hint="give a step, best or last"
        )
    return int(checkpoint)


def _pull_files(
    output: Output,
    checkpoint: Checkpoint | None,
    destination: str,
    job: Job,
    points: Callable[[], Sequence[Point]],
    pull: Callable[..., Path],
) -> None:
    from clients.jobs.artifacts import checkpoint_step

    step = None if checkpoint is None else checkpoint_step(job, checkpoint, points)
    description = job.id if step is None else f"{job.id}, checkpoint of step {step}"
    with output.stage(f"pulling {description}"):
        path = pull(Path(destination or job.id), checkpoint=step)
    output.result({"path": str(path), "checkpoint": step}, str(path))
