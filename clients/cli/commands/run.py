"""`distill run` and `distill capture`: run a job on this machine, in the foreground."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.commands.jobs import max_steps_of
from clients.cli.output import Output
from clients.cli.settings import NameOption, SetOption, overrides, settings_of
from protos.errors import ExitCode, InvalidInput, Unavailable, WrongState, error_of
from protos.operating_system import require_linux

if TYPE_CHECKING:
    from clients.config.file import JobFile
    from clients.config.kinds import AnyJob
    from clients.runs.directory import RunDirectory, Status
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
            Path(directory), _make_paths_absolute(load_job(job, job_overrides)), output
        )
    if not resume:
        return run_new(job, job_overrides, Path(runs), output, directory or "")
    run_directory, attempt = _reopen_run(Path(resume), max_steps_of(sets or []))
    return _run_and_conclude(run_directory, attempt, output, remove_if_refused=False)


def _resume_or_finish(path: Path, job: AnyJob, output: Output) -> ExitCode:
    """Resume the job of a run directory. If the job has succeeded, return OK at once.

    `job`: the job of the file. Raises InvalidInput (`--dir`) if the directory has another job.
    """
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
    run_directory, attempt = _reopen_run(path, None)
    return _run_and_conclude(run_directory, attempt, output, remove_if_refused=False)


def run_new(
    job: str, job_overrides: list[str], runs: Path, output: Output, directory: str = ""
) -> ExitCode:
    """Run the first attempt of the job in a file, in a new run directory in `runs`.

    `directory`: path of the run directory, instead of a new directory in `runs`.

    Returns the exit code of the command. If the trainer's preflight refuses the job, removes the
    run directory and raises the trainer's error.
    """
    return _run_and_conclude(
        _create_run(job, job_overrides, runs, directory), 1, output, remove_if_refused=True
    )


def _run_and_conclude(
    run: RunDirectory, attempt: int, output: Output, *, remove_if_refused: bool
) -> ExitCode:
    from clients.cli.live.display import conclude
    from clients.cli.live.foreground_run import run_attempt
    from clients.cli.live.foreground_teacher import foreground_teacher, wait_for_teachers

    output.say(f"run directory {run.path}")
    try:
        with foreground_teacher(run.config(), run, output) as inherited:
            wait_for_teachers(run.config(), output)
            progress, code = run_attempt(run, attempt, output, inherited)
    except (InvalidInput, Unavailable):  # the teacher cannot be started, or does not answer
        if remove_if_refused:
            shutil.rmtree(run.path)
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


def _create_run(job: str, job_overrides: list[str], runs: Path, directory: str) -> RunDirectory:
    from clients.config.file import load_job
    from clients.config.tables.after import outputs_in
    from clients.preflight.data_files import check_data
    from clients.preflight.files import check_files
    from clients.preflight.models import check_models
    from clients.preflight.packages import check_packages
    from clients.preflight.rollouts import check_gpus
    from clients.runs.directory import RunDirectory
    from clients.runs.identity import run_ids

    file = load_job(job, job_overrides)
    if file.config.after or outputs_in(file.config):
        raise InvalidInput(
            "only a server can start a job after other jobs",
            field="after" if file.config.after else outputs_in(file.config)[0].key,
            hint="use distill submit, or give the paths of the other job's files",
        )
    config = _make_paths_absolute(file)
    check_packages(config)
    check_gpus(config)
    check_files(config)
    check_data(config)
    check_models(config)
    parts = (config, file.text, file.path.suffix.lower())
    if directory:
        return _create_atomically(Path(directory), parts)
    for name in run_ids(config.method.type, config.name):
        with suppress(FileExistsError):
            return RunDirectory.create(runs / name, *parts)
    raise AssertionError("there is always another id")


def _create_atomically(path: Path, parts: tuple[AnyJob, str, str]) -> RunDirectory:
    """Create the run directory `path` atomically, because a script may be killed at any time.

    Raises InvalidInput if `path` exists and is not an empty directory.
    """
    from clients.runs.directory import RunDirectory

    path = path if path.name else path.absolute()  # "." has no name
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        RunDirectory.create(partial, *parts)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidInput(
            f"cannot create the run directory {path}: {(error.strerror or str(error)).lower()}",
            field="--dir",
            hint="give a new directory, or the directory of an earlier run",
        ) from error
    return RunDirectory(path)


def with_absolute_reward(job: Path, config: AnyJob) -> AnyJob:
    """Return `config` with an absolute path in `reward.file`.

    A relative path in `reward.file` starts at the directory of the job file, whose path is `job`. A
    config without `reward.file` is returned unchanged. Raises InvalidInput if there is no such
    file.
    """
    from clients.config.file import replaced

    if config.reward_table is None or config.reward_table.file is None:
        return config
    file = (job.parent / config.reward_table.file).absolute()
    if not file.is_file():
        hint = "relative paths start at the job file's directory"
        raise InvalidInput(f"no such file: {file}", field="reward.file", hint=hint)
    config = replaced(config, "reward.file", str(file))
    return config


def _make_paths_absolute(file: JobFile) -> AnyJob:
    """Return the job of a file with absolute paths, as run directories store it."""
    from clients.config.file import localized, replaced
    from clients.data.object_urls import is_object_url

    config: AnyJob = localized(with_absolute_reward(file.path, file.config))
    if config.output_store is None or is_object_url(config.output_store):
        return config
    # A later resume may run in another directory.
    config = replaced(config, "method.store", str(Path(config.output_store).absolute()))
    return config


def _reopen_run(path: Path, max_steps: int | None) -> tuple[RunDirectory, int]:
    from clients.runs.directory import Control, RunDirectory, replace_file

    run = RunDirectory(path)
    config = run.config()
    with run.held():
        status = run.read_status()
        if status and status.verdict == "succeeded" and (max_steps or 0) <= status.step:
            raise WrongState(
                f"the run {path} is finished: {status.step} of {status.max_steps} steps",
                hint="give --set max_steps=N with a larger N to continue the run",
            )
        if max_steps and config.trained_student is None:
            raise InvalidInput(
                f"a job of method {config.method.type} has no max_steps: the job ends with its"
                f" data",
                field="max_steps",
                hint="resume the job without --set",
            )
        if max_steps:
            config = config.model_copy(update={"max_steps": max_steps, "epochs": None})
            replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
        run.write_control(Control())
        return run, _new_attempt(run, status)


def _new_attempt(run: RunDirectory, status: Status | None) -> int:
    """Return an unused attempt number, and reserve the number by creating its log directory."""
    names = [log.name.removeprefix("attempt-") for log in run.logs(1).parent.glob("attempt-*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    attempt = max([*numbers, status.attempt if status else 0]) + 1
    run.logs(attempt).mkdir(parents=True)
    return attempt


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
