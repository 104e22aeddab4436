"""The artifacts of a job: its export and its checkpoints.

The export of a capture is its store. The export of an evaluation is its answers and result.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from clients.jobs.download import Download
from clients.jobs.job import Job, JobState
from clients.jobs.record import JobRecord, record_of_run
from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import Point
from protos.errors import InvalidInput, NotFound, WrongState

# A step, or a name for one: "best" by `best_step`, "last" for the newest checkpoint.
Checkpoint: TypeAlias = int | Literal["best", "last"]


def checkpoint_step(job: Job, checkpoint: Checkpoint, points: Callable[[], Sequence[Point]]) -> int:
    """Return the step of the checkpoint that a user names: a step, "last" or "best".

    - `checkpoint`: the name; a step is returned without a check that its checkpoint exists
    - `points`: returns the metrics of the job, which only "best" needs

    Raises InvalidInput for any other word. Raises NotFound if the job has no checkpoint, or, for
    "best", no checkpoint with an evaluation.
    """
    if isinstance(checkpoint, int):
        return checkpoint
    if checkpoint not in ("best", "last"):
        raise InvalidInput(
            f"{checkpoint!r} is not a checkpoint",
            field="checkpoint",
            hint="give a step, best or last",
        )
    if not job.checkpoints:
        raise NotFound(f"job {job.id} has no checkpoints", field="checkpoint")
    if checkpoint == "last":
        return job.checkpoints[-1]
    best = best_step(points(), job.checkpoints)
    if best is None:
        raise NotFound(
            f"no checkpoint of job {job.id} was evaluated",
            field="checkpoint",
            hint=f"choose last, or one of the steps {_format_steps(job.checkpoints)}",
        )
    return best


def pull_run(
    path: Path | str, destination: Path | str, *, checkpoint: Checkpoint | None = None
) -> Path:
    """Copy the export or a checkpoint of the run directory `path` into a new directory.

    The arguments, the result and the errors are those of DistillClient.pull; no server is needed.
    """
    return pull_record(record_of_run(path), path, destination, checkpoint=checkpoint)


def pull_record(
    record: JobRecord,
    path: Path | str,
    destination: Path | str,
    *,
    checkpoint: Checkpoint | None = None,
) -> Path:
    """Copy the export or a checkpoint from the run directory `path`, as `pull_run` does.

    `record`: the job of this run directory with its state and metrics, which the caller has read.
    """
    step = None
    if checkpoint is not None:
        step = checkpoint_step(record.job, checkpoint, lambda: record.points)
    with Download(Path(destination)) as download:
        download.copy(artifact_root(record.job, RunDirectory(path), step))
        return download.finish()


def artifact_root(job: Job, run: RunDirectory, step: int | None) -> Path:
    """Return the directory of an artifact: a checkpoint, or the export if `step` is None.

    The export of a capture is its store; the export of an evaluation is its results. Raises
    WrongState if the job has not succeeded and `step` is None, and NotFound if the directory does
    not exist.
    """
    require_files(job, run)
    if step is not None:
        return checkpoint_root(job, run, step)
    if job.state is JobState.FAILED:
        raise WrongState(f"job {job.id} failed: {job.reason}", field="job_id")
    if job.state is not JobState.SUCCEEDED:
        raise WrongState(
            f"job {job.id} is {job.state} and has no export",
            field="job_id",
            hint="wait until it succeeds, or choose a checkpoint",
        )
    directory = {"capture": run.store, "eval": run.evaluation}.get(job.kind, run.export)
    if not directory.is_dir():
        raise NotFound(
            f"the {directory.name} directory of job {job.id} was removed", field="job_id"
        )
    return directory


def checkpoint_root(job: Job, run: RunDirectory, step: int) -> Path:
    """Return the directory of a checkpoint.

    Raises NotFound if it does not exist; the message lists the existing checkpoints.
    """
    root = run.checkpoint(step)
    if not root.is_dir():
        existing_steps = run.checkpoint_steps()
        raise NotFound(
            f"job {job.id} has no checkpoint of step {step}",
            field="checkpoint",
            hint=f"choose one of {_format_steps(existing_steps)}"
            if existing_steps
            else "the job has no checkpoints",
        )
    return root


def require_files(job: Job, run: RunDirectory) -> None:
    """Raise NotFound if the run directory no longer exists."""
    if not run.path.is_dir():
        raise NotFound(
            f"the run directory of job {job.id} was removed",
            field="job_id",
            hint="submit the job again",
        )


def _format_steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
