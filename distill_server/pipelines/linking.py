"""Replaces names of jobs by ids at submission, and ids by paths of outputs at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from clients.config.file import replaced
from clients.config.kinds import AnyJob, parse_job
from clients.config.tables.after import JobOutput, output_of, outputs_in, parse_output
from clients.jobs.artifacts import artifact_root
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from distill_server.pipelines.dependencies import format_failed_dependency
from protos.errors import InvalidInput, NotFound, WrongState

# Returns the job that has the given name or id; raises NotFound or InvalidInput.
FindJob: TypeAlias = Callable[[str], Job]
# Maximum length of a chain of jobs in which each student is the export of the next job.
_MAX_DEPTH = 100
_WITH_ARTICLE = {"store": "a store", "export": "an export"}


@dataclass(frozen=True)
class LinkedJob:
    """A job whose references are ids in place of names, and the ids of its dependencies."""

    config: AnyJob
    dependencies: Sequence[str]


def link_job(configs: Sequence[AnyJob], ids: Sequence[str], index: int, find: FindJob) -> LinkedJob:
    """Replace the job names in config `index` by ids.

    `configs` are the jobs of one submission, and `ids` their ids. A name means an earlier job in
    `configs`, otherwise the job that `find` returns. The name of the job itself means an older job.
    Raises NotFound if there is no such job, InvalidInput if the job is later in `configs` or has no
    such output, and WrongState if the job has failed or was cancelled.
    """
    config = configs[index]

    def resolve_name(name: str, key: str) -> tuple[str, str]:
        """Return id and kind of the job with this name."""
        for earlier_config, job_id in zip(configs[:index], ids, strict=False):
            if earlier_config.name == name:
                return job_id, earlier_config.method.type
        if any(earlier_config.name == name for earlier_config in configs[index + 1 :]):
            raise InvalidInput(
                f"job {name!r} is not above {config.name!r} in the file",
                field=key,
                hint="write the job below the jobs it depends on",
            )
        try:
            job = find(name)
        except (NotFound, InvalidInput) as error:
            error.field = key
            raise
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            raise WrongState(
                format_failed_dependency(job.id, job.state),
                field=key,
                hint=f"run distill resume {job.id} first",
            )
        return job.id, job.kind

    dependencies = [resolve_name(name, "after")[0] for name in config.after]
    config = config.model_copy(update={"after": tuple(dependencies)})
    for output in outputs_in(config):
        job_id, kind = resolve_name(output.job, output.key)
        if output.kind != (available_kind := output_of(kind)):
            available = f"{_WITH_ARTICLE[available_kind]}, and no" if available_kind else "no"
            raise InvalidInput(
                f"job {job_id} is of method {kind}: it has {available} {output.kind}",
                field=output.key,
                hint="name a job with this output",
            )
        config = replaced(config, output.key, str(JobOutput(output.key, job_id, output.kind)))
        dependencies.append(job_id)
    return LinkedJob(config, tuple(dict.fromkeys(dependencies)))


def with_known_models(config: AnyJob, configs: Sequence[AnyJob], find: FindJob) -> AnyJob | None:
    """Return the job with the student of job J in place of `@J/export`, for checks of the job.

    The export has the vocabulary and the sizes of J's student. If J's student is also an export,
    the replacement is repeated until the student is a model that exists. `configs` are the jobs of
    the submission. Returns None if the job reads a store, or the export of a job without a known
    student. Raises the errors of `find`.
    """
    for output in outputs_in(config):
        student, depth = str(output), 0
        while (named_output := parse_output(student)) is not None:
            name, kind = named_output
            depth += 1
            if kind != "export" or depth > _MAX_DEPTH:
                return None
            source = next((earlier for earlier in configs if earlier.name == name), None)
            source = source or parse_job(find(name).config_json)
            if source.trained_student is None:
                return None
            student = source.trained_student.model
        config = replaced(config, output.key, student)
    return config


def with_paths(config: AnyJob, runs: Path, jobs: Mapping[str, Job]) -> AnyJob:
    """Replace references to outputs of other jobs by the paths of the outputs; reads the disk.

    `jobs` are the dependencies of the job by id. Raises WrongState or NotFound if an output does
    not exist any more.
    """
    for output in outputs_in(config):
        job = jobs[output.job]
        config = replaced(config, output.key, _output_path(job, RunDirectory(runs / job.id)))
    return config


def _output_path(job: Job, run: RunDirectory) -> str:
    root = str(artifact_root(job, run, step=None))
    return str(parse_job(job.config_json).outputs(run.path).get("store", root))
