"""Turns a trainer's status file and metrics into changes of its job."""

from __future__ import annotations

from collections.abc import Sequence

from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory, Status
from clients.runs.metrics_file import Point
from distill_server.jobs.store import Change


def status_of(run: RunDirectory, attempt: int) -> Status | None:
    """Return the status of this attempt's trainer.

    None if the file is missing, unreadable, or was written by another attempt.
    """
    status = run.read_status()
    return status if status is not None and status.attempt == attempt else None


def progress_changes(
    job: Job, status: Status | None, points: Sequence[Point], runner_phase: str = ""
) -> list[Change]:
    """Return the changes since the last poll of a PREPARING, RUNNING or CANCELLING job.

    `points` are the new metrics. `runner_phase`, if any, replaces the trainer's phase.
    """
    changes = []
    if status is not None and status.max_steps and not job.max_steps:
        changes.append(Change(max_steps=status.max_steps))
    phase = runner_phase or (status.phase if status is not None else job.phase)
    has_started = bool(points) or (status is not None and bool(status.phase or status.step))
    if job.state is JobState.PREPARING and has_started:
        changes.append(Change(JobState.RUNNING, phase=phase))
    elif phase != job.phase:
        changes.append(Change(phase=phase))
    changes += [Change(step=point.step, metrics=point.metrics) for point in points]
    return changes
