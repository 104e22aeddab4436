"""`distill run`: the same job on this machine, in the foreground, with no server."""

from __future__ import annotations

import re
import secrets
import shutil
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
    return ExitCode.INTERRUPTED if code is ExitCode.INTERRUPTED else conclusion


def _made(job: str, chosen: list[str], runs: Path) -> RunDirectory:
    from clients.config_file import load_job, localized
    from clients.run_directory import RunDirectory

    file = load_job(job, chosen)
    config = localized(file.config)
    require_files(config)
    path = runs / run_id(config)
    return RunDirectory.create(path, config, file.text, file.path.suffix.lower())


def _reopened(path: Path, max_steps: int | None) -> tuple[RunDirectory, int]:
    from clients.run_directory import RunDirectory, replace_file

    run = RunDirectory(path)
    config = run.config()
    status = run.read_status()
    if status and status.verdict == "succeeded" and (max_steps or 0) <= status.step:
        raise WrongState(
            f"{path} is done: {status.step} of {status.max_steps} steps",
            hint="--set max_steps=N with a larger N goes on",
        )
    if max_steps:
        config = config.model_copy(update={"max_steps": max_steps})
        replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
    made = [int(log.name.removeprefix("attempt-")) for log in run.logs(1).parent.glob("attempt-*")]
    return run, max([*made, status.attempt if status else 0]) + 1


def run_id(config: JobConfig) -> str:
    """Readable and unique: `on-policy-qwen3-0.6b-7f3a`."""
    kind = config.method.type.replace("_", "-")
    slug = re.sub(r"[^a-z0-9.]+", "-", config.name.lower()).strip("-.")[:40]
    return f"{kind}-{slug or 'job'}-{secrets.token_hex(2)}"


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
