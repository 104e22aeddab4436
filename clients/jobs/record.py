"""All there is to tell of a job, whether a server or a run directory tells it: what plots and
reports are made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.jobs.job import Job, JobEvent, JobState
from clients.runs.directory import RunDirectory, Status
from clients.runs.metrics_follower import Point, read_points
from protos.errors import NotFound

_STATES = {
    "running": JobState.RUNNING,
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}


@dataclass(frozen=True)
class Notes:
    """What a run directory holds besides its curves."""

    environment: Mapping[str, str] = field(default_factory=dict)
    samples_step: int = 0
    samples: Sequence[Mapping[str, Any]] = ()  # the transcripts of that step, the newest there is


@dataclass(frozen=True)
class JobRecord:
    """A job and its curve: one point a step, in order of steps."""

    job: Job
    points: Sequence[Point]
    notes: Notes = Notes()

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was measured."""
        return [(p.step, p.metrics[metric]) for p in self.points if metric in p.metrics]

    @property
    def metrics(self) -> set[str]:
        """The names of everything measured."""
        return {name for point in self.points for name in point.metrics}


def points_of(events: Iterable[JobEvent]) -> list[Point]:
    """The curve of a job's events. Steps that a later attempt did again count once, as it did."""
    points: list[Point] = []
    attempt = 0
    for event in events:
        if not event.metrics:
            continue
        if event.attempt != attempt:
            attempt = event.attempt
            points = [point for point in points if point.step < event.step]
        points.append(Point(event.step, event.metrics))
    return points


def record_of_run(path: Path | str) -> JobRecord:
    """A run directory's record, also while its trainer writes it. Raises NotFound."""
    run = RunDirectory(path)
    config = run.config()
    status = run.read_status() or Status(attempt=1, verdict="running", phase="starting")
    points = read_points(run.metrics)
    max_steps = getattr(config, "max_steps", 0)
    job = Job(
        id=run.path.resolve().name,
        name=config.name,
        kind=config.method.type,
        state=_STATES[status.verdict],
        reason=status.reason,
        phase=status.phase,
        attempt=status.attempt,
        step=points[-1].step if points else status.step,
        max_steps=status.max_steps or max_steps,
        created_at=0.0,
        started_at=0.0,
        ended_at=0.0,
        last_seq=0,
        metrics=points[-1].metrics if points else {},
        config_json=config.model_dump_json(),
        checkpoints=run.checkpoint_steps(),
    )
    return JobRecord(job, points, notes_in(run.path))


def notes_in(path: Path) -> Notes:
    """Of a run directory, or of a directory with its NOTES."""
    newest = max((path / "samples").glob("step-*.jsonl"), default=None)
    return Notes(
        environment=_mapping(path / "environment.json"),
        samples_step=int(newest.stem.removeprefix("step-")) if newest else 0,
        samples=_objects(newest) if newest else (),
    )


def is_run_directory(text: str) -> bool:
    """Whether a job that somebody named is a directory of this machine. Raises NotFound for a
    path that is none.
    """
    if (Path(text) / "job.json").is_file():
        return True
    if "/" in text:
        raise NotFound(f"{text} is not a run directory", hint="it has no job.json")
    return False


def _mapping(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _objects(path: Path) -> list[Mapping[str, Any]]:
    """The lines that are JSON objects; a killed trainer may have cut the last one."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)]
