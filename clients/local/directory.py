"""Creates the run directory of a job, and opens it again for a new attempt."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from clients.config.file import JobFile, localized, replaced
from clients.config.kinds import AnyJob
from clients.config.tables.after import outputs_in
from clients.data.object_urls import is_object_url
from clients.runs.directory import (
    SERVER_RECORD,
    Control,
    RunDirectory,
    Status,
    replace_file,
)
from clients.runs.identity import run_ids
from protos.errors import InvalidInput, WrongState


def create_run(
    config: AnyJob, runs: Path, directory: str, text: str = "", suffix: str = ".toml"
) -> RunDirectory:
    """Check a job, create its run directory, and return it.

    - `config`: the job, with absolute paths
    - `runs`: parent of a new run directory, whose name this function chooses
    - `directory`: path of the run directory; if it is not "", `runs` is not used
    - `text`, `suffix`: text and file suffix of the job file, if there is one

    Raises InvalidInput if a check fails, or if the job depends on other jobs.
    """
    from clients.preflight.data_files import check_data
    from clients.preflight.files import check_files, check_models
    from clients.preflight.packages import check_packages
    from clients.preflight.rollouts import check_gpus

    if config.after or outputs_in(config):
        raise InvalidInput(
            "only a server can start a job after other jobs",
            field="after" if config.after else outputs_in(config)[0].key,
            hint="use distill submit, or give the paths of the other job's files",
        )
    check_packages(config)
    check_gpus(config)
    check_files(config)
    check_data(config)
    check_models(config)
    parts = (config, text, suffix)
    if directory:
        return _create_atomically(Path(directory), parts)
    for name in run_ids(config.method.type, config.name):
        with suppress(FileExistsError):
            return RunDirectory.create(runs / name, *parts)
    raise AssertionError("unreachable: run_ids has no end")


def with_absolute_reward(job: Path, config: AnyJob) -> AnyJob:
    """Return the job `config` with an absolute path in `reward.file`.

    A relative path in `reward.file` starts at the directory of the job file `job`. A job without
    `reward.file` is returned unchanged. Raises InvalidInput if the file does not exist.
    """
    if config.reward_table is None or config.reward_table.file is None:
        return config
    file = (job.parent / config.reward_table.file).absolute()
    if not file.is_file():
        hint = "relative paths start at the job file's directory"
        raise InvalidInput(f"no such file: {file}", field="reward.file", hint=hint)
    config = replaced(config, "reward.file", str(file))
    return config


def with_absolute_paths(file: JobFile) -> AnyJob:
    """Return the job of a job file with absolute paths, for job.json of a run directory."""
    config: AnyJob = localized(with_absolute_reward(file.path, file.config))
    if config.output_store is None or is_object_url(config.output_store):
        return config
    # A later resume may run in another directory.
    config = replaced(config, "method.store", str(Path(config.output_store).absolute()))
    return config


def _create_atomically(path: Path, parts: tuple[AnyJob, str, str]) -> RunDirectory:
    """Create the run directory `path` with the job files in `parts`.

    The directory appears complete or not at all, because a script may be killed at any time. Raises
    InvalidInput if `path` exists and is not an empty directory.
    """
    path = path if path.name else path.absolute()  # "." has no name
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        RunDirectory.create(partial, *parts)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidInput(
            f"cannot create the run directory {path}: {(error.strerror or str(error)).lower()}",
            hint="give a new directory",
        ) from error
    return RunDirectory(path)


def reopen_run(path: Path, max_steps: int | None) -> tuple[RunDirectory, int]:
    """Prepare a run directory for a new attempt. Return it, and the number of the attempt.

    `max_steps` replaces the job's number of steps; None keeps it. Raises the errors of
    `require_unfinished`. Raises WrongState if a program runs in the directory, or if the directory
    belongs to a job of a job server, which starts the attempts itself.
    """
    run = RunDirectory(path)
    config = run.config()
    name = run.path.resolve().name
    if run.server_mark.exists() and (run.path.resolve().parent / SERVER_RECORD).exists():
        raise WrongState(
            f"the run {path} is a job of a job server, which starts its attempts",
            hint=f"use distill resume {name}, or run a copy of the directory in another place",
        )
    with run.held():
        require_unfinished(run, max_steps)
        if max_steps:
            config = config.model_copy(update={"max_steps": max_steps, "epochs": None})
            replace_file(run.job_json, config.model_dump_json(indent=2) + "\n")
        run.write_control(Control())
        attempt = next_attempt(run)
        run.logs(attempt).mkdir(parents=True)  # reserves the number
        return run, attempt


def require_unfinished(run: RunDirectory, max_steps: int | None) -> None:
    """Raise WrongState if the job of the run has finished its steps.

    `max_steps`: the new number of steps, or None. Raises InvalidInput if `max_steps` is given and a
    job of this method has no number of steps.
    """
    config, status = run.config(), run.read_status()
    if status and status.verdict == "succeeded" and (max_steps or 0) <= status.step:
        raise WrongState(
            f"the run {run.path} is finished: {status.step} of {status.max_steps} steps",
            hint="give --set max_steps=N with a larger N to continue the run",
        )
    if max_steps and config.trained_student is None:
        raise InvalidInput(
            f"a job of method {config.method.type} has no max_steps: the job ends with its data",
            field="max_steps",
            hint="resume the job without --set",
        )


def next_attempt(run: RunDirectory) -> int:
    """Return the number of the next attempt: a number that no earlier attempt has used."""
    status: Status | None = run.read_status()
    names = [log.name.removeprefix("attempt-") for log in run.logs(1).parent.glob("attempt-*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return max([*numbers, status.attempt if status else 0]) + 1
