"""`distill config`: check a job file, show its values, print its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.output import Output
from clients.cli.settings import JobFileArgument, SetOption, settings_of

if TYPE_CHECKING:
    from clients.config.file import JobFile


class MethodName(StrEnum):
    """The methods of jobs: the keys of `clients.config.kinds.KINDS`.

    They are repeated here, because importing that module is slow.
    """

    ON_POLICY = "on_policy"
    OFFLINE = "offline"
    RL = "rl"
    SFT = "sft"
    CAPTURE = "capture"
    EVAL = "eval"


app = typer.Typer(help="Check job files and show their values.", no_args_is_help=True)


@app.command()
def check(context: typer.Context, job: JobFileArgument, sets: SetOption = None) -> None:
    """Check a job file, and the files and models on this machine that it names.

    All problems of the job file are reported at once. All records of data files on this machine
    are read. Names of files that do not exist on this machine are printed: the machine that runs
    the job may have these files.
    """
    from clients.config.file import load_jobs, references_of
    from clients.jobs.upload import paths_of_server
    from clients.preflight.columns import fit_columns
    from clients.preflight.data_files import check_all_records, check_data
    from clients.preflight.files import (
        check_models,
        check_template,
        note_similar_directories,
    )
    from clients.preflight.limits import Limits

    output = settings_of(context).output
    files = load_jobs(job, sets or [])
    missing_files: set[str] = set()
    for config in (file.config for file in files):
        for note in (*check_models(config, here=False), *note_similar_directories(config)):
            output.say(note)
        check_data(config, only_existing=True)
        columns, _ = fit_columns(config, config.data_files)
        config = Limits(columns).apply(config)
        check_all_records(config, output.say)
        if config.answering_student is not None:
            check_template(config, config.answering_student.model)
        for key, path, similar in paths_of_server(config):
            suggestion = f"; did you mean {similar}?" if similar else ""
            output.say(f"{key}: {path} is not on this machine{suggestion}")
            missing_files.add(path)
    names = {file.config.name for file in files}
    references = (name for file in files for _, name in references_of(file.config))
    # Only the server can check whether these files exist.
    server_jobs = sorted({name for name in references if name not in names or len(files) == 1})
    needs = f"; needs these jobs of the server: {', '.join(server_jobs)}" if server_jobs else ""
    unchecked = f", but not checked: {', '.join(sorted(missing_files))}" if missing_files else ""
    output.result(
        {
            "file": job,
            "ok": True,
            "server_jobs": server_jobs,
            "missing_files": sorted(missing_files),
        },
        f"{job}: ok{unchecked}{needs}",
    )


@app.command()
def show(context: typer.Context, job: JobFileArgument, sets: SetOption = None) -> None:
    """Print every value of a job, and its source: default, file and line, or --set."""
    from clients.config.file import load_jobs

    print_values(settings_of(context).output, load_jobs(job, sets or []))


@app.command()
def schema(
    method: Annotated[
        MethodName | None, typer.Option(help="Only job files with this method.type.")
    ] = None,
) -> None:
    """Print the JSON Schema of job files, for editors."""
    from clients.config.kinds import KINDS, schema_of

    kinds = [KINDS[method]] if method else [*KINDS.values()]
    print(json.dumps(schema_of(kinds), indent=2))


def print_values(output: Output, files: Sequence[JobFile]) -> None:
    """Print each key of the jobs of a file, with its value and the source of the value.

    If the file has several jobs, the column `job` has the name of the job.
    """
    rows: list[Mapping[str, Any]] = []
    for file in files:
        name = {} if len(files) == 1 else {"job": file.config.name}
        rows += [{**name, **row} for row in _value_rows(file, as_json=output.as_json)]
    output.table("values", rows, tuple(rows[0]))


def _value_rows(file: JobFile, *, as_json: bool) -> Iterator[Mapping[str, Any]]:
    from pydantic import BaseModel

    for key, source in file.sources.items():
        value: Any = file.config
        for part in key.split("."):
            value = None if value is None else getattr(value, part)  # None: the table is absent
        if isinstance(value, tuple):
            value = [
                element.model_dump() if isinstance(element, BaseModel) else element
                for element in value
            ]
        printed_value = value if as_json else "-" if value is None else json.dumps(value)
        yield {"key": key, "value": printed_value, "source": source}
