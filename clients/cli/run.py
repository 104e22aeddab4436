"""`distill run`: the same job on this machine, in the foreground, with no server."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.job_commands import max_steps_of
from clients.cli.output import Output
from clients.cli.settings import NameOption, SetOption, overrides, settings_of
from protos.errors import (
    CATEGORIES,
    DistillError,
    ExitCode,
    InternalFault,
    InvalidInput,
    WrongState,
)

if TYPE_CHECKING:
    from clients.config import JobConfig
    from clients.run_directory import RunDirectory, Status


def run(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB.toml", help="Job file, TOML or YAML.")] = "",
    sets: SetOption = None,
    name: NameOption = "",
    runs: Annotated[str, typer.Option(metavar="DIR", help="Where run directories go.")] = "runs",
    resume: Annotated[
        str, typer.Option(metavar="DIR", help="Go on with this run directory; takes no job file.")
    ] = "",
) -> ExitCode:
    """Run a job here and now, without a server. Ctrl-C stops after a checkpoint, twice kills."""
    output = settings_of(context).output
    if bool(job) == bool(resume):
        raise InvalidInput("give a job file or --resume DIR", hint="see distill run --help")
    if resume:
        found, attempt = _reopened(Path(resume), max_steps_of(sets or []))
    else:
        found, attempt = _made(job, overrides(sets, name), Path(runs)), 1
    output.say(f"run directory {found.path}")
    return _attempted(found, attempt, output, remove_if_refused=not resume)


def _attempted(
    run: RunDirectory, attempt: int, output: Output, *, remove_if_refused: bool
) -> ExitCode:
    from clients.cli.attempt import run_attempt
    from clients.cli.display import conclude

    progress, code = run_attempt(run, attempt, output)
    status = run.read_status()
    if remove_if_refused and status is not None and _refused(status):
        # Nothing happened yet: a directory that cannot be resumed would only be in the way.
        shutil.rmtree(run.path)
        raise _fault(status.error)(status.reason)
    conclusion = conclude(output, progress, run=run.path)
    if conclusion is ExitCode.JOB_FAILED:
        output.say(f"its log: {run.log_file(attempt)}")
    if conclusion is not ExitCode.OK:
        output.say(f"to go on: distill run --resume {run.path}")
    # The trainer's own word for what happened before it could begin.
    return code if code in (ExitCode.INTERRUPTED, ExitCode.WRONG_STATE) else conclusion


def _made(job: str, chosen: list[str], runs: Path) -> RunDirectory:
    from clients.config_file import load_job, localized
    from clients.run_directory import RunDirectory
    from clients.run_id import run_ids

    file = load_job(job, chosen)
    config = localized(file.config)
    require_files(config)
    for name in run_ids(config.method.type, config.name):
        with suppress(FileExistsError):
            return RunDirectory.create(runs / name, config, file.text, file.path.suffix.lower())
    raise AssertionError("there is always another id")


def _reopened(path: Path, max_steps: int | None) -> tuple[RunDirectory, int]:
    from clients.run_directory import Control, RunDirectory, replace_file

    run = RunDirectory(path)
    config = run.config()
    with run.held():
        status = run.read_status()
        if status and status.verdict == "succeeded" and (max_steps or 0) <= status.step:
            raise WrongState(
                f"{path} is done: {status.step} of {status.max_steps} steps",
                hint="--set max_steps=N with a larger N goes on",
            )
        if max_steps:
            config = config.model_copy(update={"max_steps": max_steps})
            replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
        run.write_control(Control())
        return run, _new_attempt(run, status)


def _new_attempt(run: RunDirectory, status: Status | None) -> int:
    """A number that nobody has; its log directory is made at once, so that nobody else gets it."""
    names = [log.name.removeprefix("attempt-") for log in run.logs(1).parent.glob("attempt-*")]
    made = [int(name) for name in names if name.isdecimal()]
    attempt = max([*made, status.attempt if status else 0]) + 1
    run.logs(attempt).mkdir(parents=True)
    return attempt


def require_files(config: JobConfig) -> None:
    """What is a path by its looks must exist; the rest may be hub ids. Raises InvalidInput."""
    for key, name in (
        ("student.model", config.student.model),
        ("data.path", config.data.path),
        ("data.eval_path", config.data.eval_path or ""),
    ):
        data_file = key.startswith("data.") and name.endswith((".jsonl", ".parquet"))
        looks_local = name.startswith(("/", "./", "../", "~")) or data_file
        if looks_local and not Path(name).exists():
            hint = "relative paths start at the current directory"
            raise InvalidInput(f"no such file: {name}", field=key, hint=hint)


def _refused(status: Status) -> bool:
    return status.verdict == "failed" and status.phase == "preflight"


def _fault(name: str) -> type[DistillError]:
    return next((category for category in CATEGORIES if category.__name__ == name), InternalFault)
