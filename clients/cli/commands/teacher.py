"""`distill teacher`: inspect a teacher directly; list, start and stop those of a job server."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.settings import settings_of
from clients.jobs.view import duration
from protos.errors import ExitCode, InvalidInput, WrongState
from protos.program.logs import plain

if TYPE_CHECKING:
    from clients.config.tables.teacher import TeacherLink
    from clients.jobs.client import DistillClient
    from clients.jobs.job import StartedTeacher

COLUMNS = (
    "key",
    "state",
    "model",
    "engine",
    "address",
    "age",
    "attempt",
    "kept",
    "load",
    "jobs",
    "reason",
)

_PAUSE_SECONDS = 0.5

app = typer.Typer(
    help="Inspect, start and stop teachers.",
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
                "kept": "yes" if row["kept"] else "no",
                "load": f"{row['active_streams']} streams, {row['queued_tokens']} tokens",
            }
            for row in rows
        ]
    settings.output.table("teachers", rows, COLUMNS)


@app.command()
def up(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory on the server's machine, or hub id.")],
    engine: Annotated[str, typer.Option(help="hf, vllm or fake.")] = "hf",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of a job's table `teacher`, such as gpus=2. Repeatable.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the teacher answers.")] = True,
) -> ExitCode:
    """Start a teacher on the job server, which keeps it until `distill teacher down`.

    Jobs with the same teacher.model and options use it.
    """
    settings = settings_of(context)
    teacher = _parse_teacher(model, engine, sets or [])
    with settings.client() as client:
        started = client.start_teacher(teacher)
        if wait:
            with settings.output.stage(f"starting teacher {started.key}"):
                started = _wait_until_started(client, started)
    settings.output.result(
        asdict(started), f"{started.key} {started.state} {started.address}".rstrip()
    )
    if started.state == "FAILED":
        settings.output.say(f"it failed: {started.reason}")
        return ExitCode.JOB_FAILED
    return ExitCode.OK


@app.command()
def down(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Its key in `distill teacher ls`, or a prefix of it.")],
) -> None:
    """Stop a teacher of the job server. One that jobs use ends after the last of them."""
    settings = settings_of(context)
    with settings.client() as client:
        teacher = client.stop_teacher(key)
    if teacher.jobs:
        settings.output.say(f"it ends after its jobs: {' '.join(teacher.jobs)}")
    settings.output.result(asdict(teacher), f"{teacher.key} {teacher.state}")


def _parse_teacher(model: str, engine: str, sets: list[str]) -> TeacherLink:
    """Return the table `teacher` of a job. Raises InvalidInput, naming the key that is wrong."""
    from pydantic import ValidationError

    from clients.config.file import parse_override
    from clients.config.problems import describe
    from clients.config.tables.teacher import TeacherLink

    model = str(Path(model).absolute()) if Path(model).exists() else model
    values: dict[str, object] = {"model": model, "engine": engine}
    for path, value in map(parse_override, sets):
        values[".".join(path).removeprefix("teacher.")] = value
    try:
        return TeacherLink.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        problem["loc"] = ("teacher", *problem["loc"])
        path, message = next(describe(problem))
        raise InvalidInput(message, field=".".join(path)) from error


def _wait_until_started(client: DistillClient, teacher: StartedTeacher) -> StartedTeacher:
    """Wait until a teacher is READY or FAILED, or somebody has stopped it."""
    while teacher.state not in ("READY", "FAILED", "STOPPING"):
        time.sleep(_PAUSE_SECONDS)
        same_key = [candidate for candidate in client.teachers() if candidate.key == teacher.key]
        if not same_key:
            raise WrongState(f"teacher {teacher.key} was stopped", field="teacher.model")
        teacher = same_key[0]
    return teacher
