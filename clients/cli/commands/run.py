"""`distill run` and `distill capture`: run a job on this machine, in the foreground."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.commands.jobs import max_steps_of
from clients.cli.output import Output
from clients.cli.settings import NameOption, SetOption, overrides, settings_of
from protos.errors import ExitCode, InvalidInput, Unavailable, error_of
from protos.operating_system import require_linux

if TYPE_CHECKING:
    from clients.config.kinds import AnyJob
    from clients.runs.directory import RunDirectory
from clients.cli.settings import JobFileArgument


def run(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB.toml", help="Job file, TOML or YAML.")] = "",
    sets: SetOption = None,
    name: NameOption = "",
    runs: Annotated[
        str, typer.Option(metavar="DIR", help="Parent directory of the run directory.")
    ] = "runs",
    resume: Annotated[
        str, typer.Option(metavar="DIR", help="Resume this run directory; give no job file.")
    ] = "",
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Run directory: created for a new job, resumed as with --resume if it exists."
            " For batch scripts that are started again.",
        ),
    ] = None,
) -> ExitCode:
    """Run a job on this machine, in the foreground, without a server.

    Ctrl-C stops the job after a checkpoint; a second Ctrl-C kills it.
    """
    from clients.local.directory import reopen_run, with_absolute_paths

    require_linux("distill run")
    output = settings_of(context).output
    if bool(job) == bool(resume):
        raise InvalidInput("give either a job file or --resume DIR", hint="see distill run --help")
    if directory is not None and resume:
        raise InvalidInput("needs a job file", field="--dir", hint="remove --dir or --resume")
    if directory == "":
        raise InvalidInput("is empty", field="--dir", hint="name the run directory")
    job_overrides = overrides(sets, name)
    if directory is not None and (Path(directory) / "job.json").exists():
        from clients.config.file import load_job

        return _resume_or_finish(
            Path(directory), with_absolute_paths(load_job(job, job_overrides)), output
        )
    if not resume:
        return run_new(job, job_overrides, Path(runs), output, directory or "")
    run_directory, attempt = reopen_run(Path(resume), max_steps_of(sets or []))
    return _run_and_conclude(run_directory, attempt, output, remove_if_refused=False)


def _resume_or_finish(path: Path, job: AnyJob, output: Output) -> ExitCode:
    """Resume the job of the run directory `path`. If the job has succeeded, return OK at once.

    `job`: the job in the job file that the user gave. Raises InvalidInput (`--dir`) if the run
    directory belongs to a job with other values.
    """
    from clients.local.directory import reopen_run
    from clients.runs.directory import RunDirectory
    from clients.runs.identity import first_difference

    made_with = RunDirectory(path).config()
    if differs := first_difference(made_with.model_dump(), job.model_dump()):
        key, previous_value, new_value = differs
        raise InvalidInput(
            f"{path} was created with {key} = {previous_value!r}, not {new_value!r}",
            field="--dir",
            hint=f"give the same job file and --set, or another directory; distill run --resume"
            f" {path} continues the old run",
        )
    status = RunDirectory(path).read_status()
    if status is not None and status.verdict == "succeeded":
        output.say(f"the run {path} is finished: {status.step} of {status.max_steps} steps")
        return ExitCode.OK
    run_directory, attempt = reopen_run(path, None)
    return _run_and_conclude(run_directory, attempt, output, remove_if_refused=False)


def run_new(
    job: str, job_overrides: list[str], runs: Path, output: Output, directory: str = ""
) -> ExitCode:
    """Create a run directory for the job file `job`, and run the first attempt of the job.

    - `job_overrides`: KEY=VALUE strings that replace values of the job file
    - `runs`: parent of the new run directory
    - `directory`: path of the run directory itself; if it is not "", `runs` is not used

    Returns the exit code of the command. If the trainer's preflight refuses the job, this function
    removes the run directory and raises the trainer's error.
    """
    from clients.config.file import load_job
    from clients.local.directory import create_run, with_absolute_paths

    file = load_job(job, job_overrides)
    config, suffix = with_absolute_paths(file), file.path.suffix.lower()
    run = create_run(config, runs, directory, file.text, suffix)
    return _run_and_conclude(run, 1, output, remove_if_refused=True)


def _run_and_conclude(
    run: RunDirectory, attempt: int, output: Output, *, remove_if_refused: bool
) -> ExitCode:
    from clients.cli.live.display import conclude
    from clients.cli.live.foreground_run import run_attempt
    from clients.cli.live.foreground_teacher import foreground_teacher, wait_for_teachers
    from clients.runs.directory import Status

    output.say(f"run directory {run.path}")
    try:
        with foreground_teacher(run.config(), run, output) as inherited:
            wait_for_teachers(run.config(), output)
            progress, code = run_attempt(run, attempt, output, inherited)
    except (InvalidInput, Unavailable) as error:  # the teacher cannot be started or used
        if remove_if_refused:
            shutil.rmtree(run.path)
        else:
            failure = Status(attempt, "failed", reason=str(error), code=error.code.value)
            run.write_status(replace(failure, field=error.field))
        raise
    status = run.read_status()
    if remove_if_refused and status and (status.verdict, status.phase) == ("failed", "preflight"):
        # The job was refused before its first step: there is nothing to resume.
        shutil.rmtree(run.path)
        raise error_of(status.code, status.reason)
    conclusion = conclude(output, progress, run=run.path, **run.config().outputs(run.path))
    if conclusion is ExitCode.JOB_FAILED:
        output.say(f"trainer log: {run.log_file(attempt)}")
    if conclusion is not ExitCode.OK:
        output.say(f"to resume: distill run --resume {run.path}")
    # These two codes are more specific than the job's state.
    return code if code in (ExitCode.INTERRUPTED, ExitCode.WRONG_STATE) else conclusion


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
    require_linux("distill capture")
    capture_overrides = ["method.type=capture"]
    capture_overrides += [f"method.store={store}"] if store else []
    capture_overrides += [f"method.shard={shard}"] if shard else []
    capture_overrides += ["method.ray={}"] if ray else []
    return run_new(
        job, [*capture_overrides, *overrides(sets, name)], Path(runs), settings_of(context).output
    )
