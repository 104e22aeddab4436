"""`distill logs` and `distill pull`: the bytes a job left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from clients.cli.settings import JobArgument, settings_of
from protos.errors import ExitCode


def logs(
    context: typer.Context,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the attempt ends.")] = False,
    lines: Annotated[int, typer.Option("-n", min=0, help="Only the last lines; 0: all.")] = 0,
    attempt: Annotated[int, typer.Option("--attempt", min=0, help="0: the newest.")] = 0,
) -> ExitCode:
    """Print what a job's trainer printed."""
    settings = settings_of(context)
    try:
        with settings.client() as client:
            chunks = client.logs(job, attempt=attempt, follow=follow, tail_lines=lines)
            if settings.output.as_json:
                for line in whole_lines(chunks):
                    print(json.dumps({"line": line}), flush=True)
            else:
                for chunk in chunks:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        if follow:
            settings.output.say(f"the job goes on; distill logs -f {job}")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def whole_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a stream that is cut anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def pull(
    context: typer.Context,
    job: JobArgument,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="This checkpoint, not the export.")
    ] = None,
    destination: Annotated[
        str, typer.Option("-o", metavar="DIR", help="By default a directory named as the job.")
    ] = "",
) -> None:
    """Fetch the trained model, a Hugging Face directory."""
    settings = settings_of(context)
    with settings.client() as client:
        job_id = client.get(job).id
        with settings.output.stage(f"pulling {job_id}"):
            path = client.pull(job_id, Path(destination or job_id), checkpoint=checkpoint)
    settings.output.result({"path": str(path)}, str(path))
