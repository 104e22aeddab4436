"""What can be fetched of a job: its export, a capture's store, or one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from clients.jobs.download import Download
from clients.jobs.job import Job, JobState
from clients.jobs.record import record_of_run
from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_follower import Point
from protos.errors import InvalidInput, NotFound, WrongState

# A step, or what is meant by it.
Checkpoint: TypeAlias = int | Literal["best", "last"]


def checkpoint_step(job: Job, wanted: Checkpoint, points: Callable[[], Sequence[Point]]) -> int:
    """The step that is meant; the job's curve, `points`, is only fetched for the best.

    Raises NotFound, and InvalidInput for another word.
    """
    if isinstance(wanted, int):
        return wanted
    if wanted not in ("best", "last"):
        raise InvalidInput(f"{wanted!r} is no step, best or last", field="checkpoint")
    if not job.checkpoints:
        raise NotFound(f"job {job.id} has no checkpoints", field="checkpoint")
    if wanted == "last":
        return job.checkpoints[-1]
    best = best_step(points(), job.checkpoints)
    if best is None:
        raise NotFound(
            f"no checkpoint of job {job.id} was evaluated",
            field="checkpoint",
            hint=f"ask for the last, or one of {_listed(job.checkpoints)}",
        )
    return best


def pull_run(
    path: Path | str, destination: Path | str, *, checkpoint: Checkpoint | None = None
) -> Path:
    """Copy the export of a run directory, or a checkpoint of it, into a new directory.

    As DistillClient.pull does from a server.
    """
    run, record = RunDirectory(path), record_of_run(path)
    step = None
    if checkpoint is not None:
        step = checkpoint_step(record.job, checkpoint, lambda: record.points)
    with Download(Path(destination)) as download:
        download.copy(artifact_root(record.job, run, step))
        return download.finish()


def artifact_root(job: Job, run: RunDirectory, step: int | None) -> Path:
    """The directory to send; raises NotFound, or WrongState when the job has no export."""
    require_files(job, run)
    if step is not None:
        return checkpoint_root(job, run, step)
    if job.state is JobState.FAILED:
        raise WrongState(f"job {job.id} failed: {job.reason}", field="job_id")
    if job.state is not JobState.SUCCEEDED:
        raise WrongState(
            f"job {job.id} is {job.state} and has no export",
            field="job_id",
            hint="wait for its end, or ask for a checkpoint",
        )
    made = run.store if job.kind == "capture" else run.export
    if not made.is_dir():
        raise NotFound(f"the {made.name} of job {job.id} is gone", field="job_id")
    return made


def checkpoint_root(job: Job, run: RunDirectory, step: int) -> Path:
    """Raises NotFound, which names those that are there."""
    root = run.checkpoint(step)
    if not root.is_dir():
        known = run.checkpoint_steps()
        raise NotFound(
            f"job {job.id} has no checkpoint of step {step}",
            field="checkpoint",
            hint=f"there are: {_listed(known)}" if known else "it has none",
        )
    return root


def require_files(job: Job, run: RunDirectory) -> None:
    """Raises NotFound when somebody removed the run directory."""
    if not run.path.is_dir():
        raise NotFound(
            f"the files of job {job.id} are gone",
            field="job_id",
            hint="they were removed from the server; submit the job again",
        )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
