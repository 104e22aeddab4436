"""Results of several jobs: the newest and the best evaluation of each job."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from clients.jobs.job import Job
from clients.jobs.view import size
from clients.runs.best_step import JUDGES, sign_of, unproven_gain
from clients.runs.metrics_file import Point
from protos.errors import InvalidInput

# The metrics of a step that tell how far a job has come, by method; the first that a job has.
_PROGRESS = {
    "rl": ("reward/mean", "kl/anchor"),
    "sft": ("cross_entropy",),
    "eval": ("eval/accuracy", "eval/reward"),
    "capture": ("bytes",),
}
_PROGRESS_OF_OTHERS = ("kl/teacher", "kl/teacher_bound", "cross_entropy", "kl/anchor")
_LABELS = {
    "kl/teacher": "kl",
    "kl/teacher_bound": "kl bound",
    "kl/anchor": "kl anchor",
    "cross_entropy": "loss",
    "reward/mean": "reward",
    "eval/accuracy": "accuracy",
    "eval/reward": "reward",
    "bytes": "stored",
}

# The metrics that compare jobs, and their standard errors.
JUDGING_METRICS = tuple(name for metric in JUDGES for name in (metric, f"{metric}_stderr"))


@dataclass(frozen=True)
class Measurement:
    """The value of a metric at a step.

    `stderr`: the standard error of the value; None if it was not measured.
    """

    step: int
    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Result:
    """A job with the newest value (`last`) and the best value of a metric.

    Both are None if the metric was not measured. `best` is also None for a metric of which neither
    large nor small values are better.
    """

    job: Job
    last: Measurement | None
    best: Measurement | None

    def equals(self, other: Result) -> bool:
        """Return whether both jobs have a best value, and the two values are equal."""
        return bool(self.best and other.best and self.best.value == other.best.value)


def progress_metric(method: str, metrics: Collection[str]) -> tuple[str, str] | None:
    """Return (name, label) of the metric in `metrics` that best shows the progress of a job.

    `method`: the method of the job. Returns None if the job has recorded no such metric.
    """
    candidates = (*_PROGRESS.get(method, ()), *_PROGRESS_OF_OTHERS)
    metric = next((metric for metric in candidates if metric in metrics), None)
    return None if metric is None else (metric, _LABELS[metric])


def result_of(job: Job, points: Iterable[Point], metric: str) -> Result:
    """Return the newest and the best value of a metric of a job.

    `points`: the metrics of the job's steps, in ascending order of steps.
    """
    measurements = [
        Measurement(point.step, point.metrics[metric], point.metrics.get(f"{metric}_stderr"))
        for point in points
        if metric in point.metrics
    ]
    best: Measurement | None = None
    if sign := sign_of(metric):
        best = max(
            measurements,
            key=lambda measurement: (sign * measurement.value, measurement.step),
            default=None,
        )
    return Result(job, measurements[-1] if measurements else None, best)


def best_result(results: Iterable[Result], metric: str) -> Result | None:
    """Return the result with the best value of the metric; None if no job has a best value."""
    measured = [result for result in results if result.best is not None]
    sign = sign_of(metric)
    key = lambda result: sign * result.best.value  # noqa: E731
    return max(measured, key=key, default=None)


def verdict_of(job: Job, points: Sequence[Point]) -> str:
    """Return one or two sentences about the evaluations of a job; "" without an evaluation.

    `points`: the metrics of all steps, or only of the steps with an evaluation, in ascending order.
    """
    metric = judging_metric([points])
    result = result_of(job, points, metric)
    if result.last is None or result.best is None:
        return ""
    last, best = result.last, result.best
    first = next(point for point in points if metric in point.metrics)
    steps = [f"{first.metrics[metric]:.4g} at step {first.step}"] if first.step != last.step else []
    steps.append(f"{last.value:.4g} at step {last.step}")
    verdict = f"{metric}: {', '.join(steps)}"
    if best.step not in (first.step, last.step):
        verdict += f"; best {best.value:.4g} at step {best.step}"
    elif steps[1:]:
        verdict += f"; step {best.step} is the best"
    doubt = unproven_gain(points, best.step)
    return f"{verdict}. {doubt[0].upper()}{doubt[1:]}." if doubt else f"{verdict}."


def require_metric(metric: str, metrics: Sequence[str], *, field: str = "-m") -> None:
    """Raise InvalidInput, naming `field`, if no job has recorded the metric.

    `metrics`: the names of all metrics that a job has recorded.
    """
    if metric not in metrics:
        similar_metrics = difflib.get_close_matches(metric, metrics, n=1)
        hint = (
            f"did you mean '{similar_metrics[0]}'?"
            if similar_metrics
            else f"recorded are {', '.join(metrics)}"
        )
        raise InvalidInput(f"no job has the metric '{metric}'", field=field, hint=hint)


def judging_metric(histories: Iterable[Iterable[Point]]) -> str:
    """Return the name of the held-out metric for the comparison of jobs.

    `histories`: for each job, the metrics of its steps. The metrics that can select a checkpoint
    have a fixed order (`JUDGES`); the first one that any of the jobs has measured is returned.
    Returns "" if no job was evaluated.
    """
    metric_names = {name for points in histories for point in points for name in point.metrics}
    return next((metric for metric in JUDGES if metric in metric_names), "")


def differing_labels(jobs: Sequence[Job]) -> Sequence[str]:
    """Return the names of the labels whose values are not the same for all jobs."""
    names = sorted({name for job in jobs for name in job.labels})
    return [name for name in names if len({job.labels.get(name) for job in jobs}) > 1]


def newest_result(job: Job) -> str:
    """Return the newest value of the metric that shows the progress of a job, and its label.

    Returns "-" if the job has not recorded such a metric.
    """
    if (progress := progress_metric(job.kind, job.metrics)) is None:
        return "-"
    metric, label = progress
    value = job.metrics[metric]
    return f"{size(value) if metric == 'bytes' else f'{value:.4g}'} {label}"
