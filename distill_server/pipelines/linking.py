"""From names to jobs at submission, and from jobs to the paths of their outputs at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from clients.config.capture import CaptureJob
from clients.config.file import replaced
from clients.config.kinds import AnyJob, parse_job
from clients.config.tables.after import Output, output_of, outputs_in
from clients.jobs.artifacts import artifact_root
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from distill_server.pipelines.dependencies import ended_badly
from protos.errors import InvalidInput, NotFound, WrongState

# Returns the job that a user means by a name or an id; raises NotFound or InvalidInput.
Find: TypeAlias = Callable[[str], Job]
_A = {"store": "a store", "export": "an export"}


@dataclass(frozen=True)
class Linked:
    """A job in which ids stand for all names of jobs, and the ids of the jobs before it."""

    config: AnyJob
    before: Sequence[str]


def linked(configs: Sequence[AnyJob], ids: Sequence[str], number: int, find: Find) -> Linked:
    """Link job `number` of those submitted together under `ids` with the others and older jobs.

    A name means a job above in `configs`, else the job that `find` returns: a job's own name means
    an older job. Raises NotFound if there is no such job, InvalidInput if it is below, or has no
    such output, and WrongState if it has failed or was cancelled.
    """
    config = configs[number]

    def meant(name: str, key: str) -> tuple[str, str]:
        """Return id and kind of the job with this name."""
        for other, job_id in zip(configs[:number], ids, strict=False):
            if other.name == name:
                return job_id, other.method.type
        if any(other.name == name for other in configs[number + 1 :]):
            raise InvalidInput(
                f"job {name!r} is not above {config.name!r} in the file",
                field=key,
                hint="put a job below the jobs that it comes after",
            )
        try:
            job = find(name)
        except (NotFound, InvalidInput) as error:
            error.field = key
            raise
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            raise WrongState(
                ended_badly(job.id, job.state), field=key, hint=f"first: distill resume {job.id}"
            )
        return job.id, job.kind

    before = [meant(name, "after")[0] for name in config.after]
    config = config.model_copy(update={"after": tuple(before)})
    for output in outputs_in(config):
        job_id, kind = meant(output.job, output.key)
        if output.kind != (made := output_of(kind)):
            has = f"{_A[made]}, and no" if made else "no"
            raise InvalidInput(
                f"job {job_id} is of method {kind}: it has {has} {output.kind}",
                field=output.key,
                hint="name a job with this output",
            )
        config = replaced(config, output.key, str(Output(output.key, job_id, output.kind)))
        before.append(job_id)
    return Linked(config, tuple(dict.fromkeys(before)))


def with_paths(config: AnyJob, runs: Path, jobs: Mapping[str, Job]) -> AnyJob:
    """Return the job with the paths of the outputs that it reads; reads the disk.

    `jobs` are the jobs before it, by id.

    Raises WrongState or NotFound if an output is not there any more.
    """
    for output in outputs_in(config):
        job = jobs[output.job]
        config = replaced(config, output.key, _path(job, RunDirectory(runs / job.id)))
    return config


def _path(job: Job, run: RunDirectory) -> str:
    made = str(artifact_root(job, run, step=None))
    config = parse_job(job.config_json)
    return config.method.store_in(run.path) if isinstance(config, CaptureJob) else made
