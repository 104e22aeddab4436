"""The columns of job lists: models, progress and evaluations of each job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from clients.jobs.job import Job
from clients.jobs.record import points_of
from clients.jobs.results import (
    best_result,
    differing_labels,
    judging_metric,
    progress_metric,
    result_of,
)
from clients.runs.best_step import sign_of
from distill_server.dashboard.job_details import read_summary
from distill_server.jobs.store import JobStore

_CURVE_POINTS = 32
# A job that has not changed since the last page is not read again.
_MAX_JOBS = 2000


class Outcomes:
    """Reads the outcomes of jobs, and caches those of the most recently read jobs."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._cached = lru_cache(_MAX_JOBS)(self._read)

    def describe(self, job: Job) -> dict[str, Any]:
        """Return `summary`, `result` and `held_out` of a job as a JSON record.

        `summary` is `STUDENT <- TEACHER, DATA`. `result` is the metric that measures the progress
        of the job: its `metric`, `label`, newest `value`, and `curve`, up to 32 values over the
        steps. `held_out` is the newest evaluation: its `metric`, `label`, `value`, `step`, and the
        value and step of the `best` one. Both are null if there is none.
        """
        return self._cached(job.id, job.last_seq)

    def _read(self, job_id: str, last_seq: int) -> dict[str, Any]:
        job = self._store.job(job_id)
        summary = read_summary(job)
        return {
            "summary": "" if summary is None else str(summary),
            "result": self._read_progress(job),
            "held_out": self._read_evaluations(job),
        }

    def _read_progress(self, job: Job) -> dict[str, Any] | None:
        points = points_of(self._store.sampled_steps(job, _CURVE_POINTS))
        # The newest step may lack a metric that others have.
        names = {name for point in points for name in point.metrics} | set(job.metrics)
        if (progress := progress_metric(job.kind, names)) is None:
            return None
        metric, label = progress
        curve = [point.metrics[metric] for point in points if metric in point.metrics]
        value = job.metrics.get(metric, curve[-1] if curve else None)
        return {"metric": metric, "label": label, "value": value, "curve": curve}

    def _read_evaluations(self, job: Job) -> dict[str, Any] | None:
        points = points_of(self._store.evaluations(job.id))
        metric = judging_metric([points])
        result = result_of(job, points, metric)
        if result.last is None or result.best is None:
            return None
        last, best = result.last, result.best
        return {
            "metric": metric,
            "label": metric.removeprefix("eval/")
            .replace("cross_entropy", "loss")
            .replace("_", " "),
            "value": last.value,
            "step": last.step,
            "best": {"value": best.value, "step": best.step},
        }


def results_table(store: JobStore, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the table that `distill table` prints for these jobs, as a JSON record.

    `metric` is the held-out metric, "" without evaluations; `labels` are the names of labels that
    differ. `rows` has the jobs, with the best value of the metric first, then those without a
    value: `id`, `name`, `state`, `step`, `max_steps`, `labels`, `last` and `best` (`value`,
    `step`, `stderr`; null if not measured), and `is_best`.
    """
    points = [points_of(store.evaluations(job.id)) for job in jobs]
    metric = judging_metric(points)
    results = [result_of(job, of_job, metric) for job, of_job in zip(jobs, points, strict=True)]
    best = best_result(results, metric)
    sign = sign_of(metric)
    results.sort(key=lambda result: -sign * result.best.value if result.best else math.inf)
    rows = [
        {
            "id": result.job.id,
            "name": result.job.name,
            "state": result.job.state,
            "step": result.job.step,
            "max_steps": result.job.max_steps,
            "labels": result.job.labels,
            "last": result.last and asdict(result.last),
            "best": result.best and asdict(result.best),
            "is_best": best is not None and result.equals(best),
        }
        for result in results
    ]
    return {"metric": metric, "labels": differing_labels(jobs), "rows": rows}
