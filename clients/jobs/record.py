"""JobRecord: a job with its metrics and notes, for plots and reports.

A record is read from a server or from a run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.data.preview import Preview, parse_preview
from clients.jobs.job import Job, JobEvent, JobState
from clients.runs.directory import RunDirectory, Status
from clients.runs.metrics_file import Point, read_curves
from protos.errors import NotFound

STATES = {
    "running": JobState.RUNNING,
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}


@dataclass(frozen=True)
class Notes:
    """The contents of a run directory that a report shows in addition to the metrics.

    - `environment`: software and hardware of the newest attempt, by name
    - `samples_step`, `samples`: the newest evaluation that sampled answers, and these answers
    - `preview`: the training data, token by token; None if it was not written
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    samples_step: int = 0
    samples: Sequence[Mapping[str, Any]] = ()
    preview: Preview | None = None


@dataclass(frozen=True)
class JobRecord:
    """A job with its metrics and notes. `points`: the metrics of each step, in ascending order."""

    job: Job
    points: Sequence[Point]
    notes: Notes = Notes()

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) for each step at which the metric was measured."""
        return [
            (point.step, point.metrics[metric]) for point in self.points if metric in point.metrics
        ]

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics that were measured in at least one step."""
        return {name for point in self.points for name in point.metrics}


def points_of(events: Iterable[JobEvent]) -> list[Point]:
    """Return the metrics of each step, read from the events of a job, in ascending order of steps.

    If a later attempt repeated a step, only the metrics of the later attempt are returned.
    """
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
    """Read the record of a run directory. The program of the job may still be running.

    For a long run, the record has only some of the steps (see `read_curves`). The times and
    `last_seq` of the job are 0, because only a server knows them. Raises NotFound if `path` is not
    a run directory, and WrongState if another version of this software wrote it.
    """
    run = RunDirectory(path)
    config = run.config()
    status = run.read_status() or Status(attempt=1, verdict="running", phase="starting")
    points = read_curves(run.metrics)
    job = Job(
        id=run.path.resolve().name,
        name=config.name,
        kind=config.method.type,
        state=STATES[status.verdict],
        reason=status.reason,
        phase=status.phase,
        attempt=status.attempt,
        step=points[-1].step if points else status.step,
        max_steps=status.max_steps or config.max_steps,
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
    """Read the notes from a run directory, or from a directory that `pull_notes` wrote."""
    newest = max((path / "samples").glob("step-*.jsonl"), default=None)
    return Notes(
        environment=_read_mapping(path / "environment.json"),
        samples_step=int(newest.stem.removeprefix("step-")) if newest else 0,
        samples=_read_objects(newest) if newest else (),
        preview=_read_preview(RunDirectory(path).preview),
    )


def is_run_directory(text: str) -> bool:
    """Return True if `text` is a run directory on this machine, and False if it can be a job id.

    Raises NotFound if `text` contains "/", which no job id has, but is not a run directory.
    """
    if (Path(text) / "job.json").is_file():
        return True
    if "/" in text:
        raise NotFound(f"{text} is not a run directory", hint="a run directory has a job.json")
    return False


def _read_mapping(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(key): str(value) for key, value in content.items()}
        if isinstance(content, dict)
        else {}
    )


def _read_preview(path: Path) -> Preview | None:
    try:
        return parse_preview(path.read_bytes())
    except (OSError, ValueError):  # an older version wrote none, or another one
        return None


def _read_objects(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the lines of a file. Other lines are skipped.

    The last line may be incomplete, if the program that wrote it was killed.
    """
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return [value for value in values if isinstance(value, dict)]
