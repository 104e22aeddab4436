"""The columns of job lists: summary, progress and evaluations of each job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from clients.jobs.job import Job
from clients.jobs.record import points_of
from clients.jobs.results import (
    JUDGING_METRICS,
    Result,
    best_result,
    differing_labels,
    progress_metric,
    result_of,
)
from clients.runs.best_step import JUDGES, sign_of
from distill_server.dashboard.job_details import read_summary
from distill_server.jobs.store import JobStore

_CURVE_POINTS = 32
# The outcomes of the jobs that were read last are kept.
_MAX_JOBS = 2000


@dataclass
class _Evaluations:
    """The cached evaluations of a job.

    `results` has the result by metric, from the events of attempt `attempt` up to the event `seq`.
    """

    attempt: int = 0
    seq: int = 0
    results: Mapping[str, Result] = field(default_factory=dict)


class Outcomes:
    """Reads the outcomes of jobs, and caches the outcomes of the most recently read jobs."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._evaluations = lru_cache(_MAX_JOBS)(lambda job_id: _Evaluations())
        self._summaries = lru_cache(_MAX_JOBS)(self._read_summary)
        self._points = lru_cache(_MAX_JOBS)(self._read_points)

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the outcome of a job as a JSON record.

        - summary: a text such as `STUDENT <- TEACHER, DATA`.
        - result: the metric that measures the progress of the job: its `metric`, `label`, newest
          `value`, and `curve`, up to 33 values over the steps. null if there is no such metric.
        - held_out: the newest evaluation: its `metric`, `label`, `value`, `step`, and `best` with
          the value and step of the best evaluation. null if there is no evaluation.
        """
        return {
            "summary": self._summaries(job.id, job.max_steps),
            "result": self._describe_progress(job),
            "held_out": self._describe_evaluations(job),
        }

    def _read_summary(self, job_id: str, max_steps: int) -> str:
        """Return the summary of a job; "" if this version cannot read the job.

        `max_steps` is only a part of the cache's key: the summary changes if the job is resumed
        with more steps.
        """
        summary = read_summary(self._store.job(job_id))
        return "" if summary is None else str(summary)

    def _describe_progress(self, job: Job) -> dict[str, Any] | None:
        # The curve is read again after each 1/32 of the events, and ends with the newest value.
        interval = 1 << max(0, job.last_seq.bit_length() - 6)
        points = self._points(job.id, job.last_seq - job.last_seq % interval)
        # The newest step may lack a metric that others have.
        names = {name for point in points for name in point} | set(job.metrics)
        if (progress := progress_metric(job.kind, names)) is None:
            return None
        metric, label = progress
        curve = [point[metric] for point in points if metric in point]
        if metric in job.metrics and curve[-1:] != [job.metrics[metric]]:
            curve.append(job.metrics[metric])
        return {"metric": metric, "label": label, "value": curve[-1], "curve": curve}

    def _read_points(self, job_id: str, last_seq: int) -> Sequence[Mapping[str, float]]:
        job = replace(self._store.job(job_id), last_seq=last_seq)
        return [point.metrics for point in points_of(self._store.sampled_steps(job, _CURVE_POINTS))]

    def _describe_evaluations(self, job: Job) -> dict[str, Any] | None:
        results = self.results(job)
        metric = next((metric for metric in JUDGES if metric in results), "")
        if not metric:
            return None
        last, best = results[metric].last, results[metric].best
        assert last is not None
        assert best is not None
        return {
            "metric": metric,
            "label": metric.removeprefix("eval/")
            .replace("cross_entropy", "loss")
            .replace("_", " "),
            "value": last.value,
            "step": last.step,
            "best": {"value": best.value, "step": best.step},
        }

    def results(self, job: Job) -> Mapping[str, Result]:
        """Return the newest and the best value of each metric of JUDGES that the job has."""
        known = self._evaluations(job.id)
        if known.seq == job.last_seq and known.attempt == job.attempt:
            return known.results
        # A later attempt replaces the steps that it repeats, so all events are read again.
        is_same_attempt = known.attempt == job.attempt
        earlier = known.results if is_same_attempt else {}
        after_seq = known.seq if is_same_attempt else 0
        points = points_of(self._store.evaluations(job.id, JUDGING_METRICS, after_seq))
        new_results = {metric: result_of(job, points, metric) for metric in JUDGES}
        known.results = {
            **earlier,
            **{
                metric: _join(metric, earlier.get(metric), result)
                for metric, result in new_results.items()
                if result.last is not None
            },
        }
        known.attempt, known.seq = job.attempt, job.last_seq
        return known.results


def _join(metric: str, earlier: Result | None, later: Result) -> Result:
    """Return the result with the newest value of `later` and the better of the two best values.

    `earlier` and `later` are results of the same job and metric. `later` has the newer evaluations.
    """
    if earlier is None:
        return later
    sign = sign_of(metric)
    measured = [best for best in (earlier.best, later.best) if best is not None]
    return replace(later, best=max(measured, key=lambda best: (sign * best.value, best.step)))


def results_table(outcomes: Outcomes, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the table that `distill table` prints for these jobs, as a JSON record.

    - metric: the held-out metric; "" without evaluations.
    - labels: names of the labels that differ between the jobs.
    - rows: the jobs. The job with the best value of the metric is first; jobs without a value are
      last. A row has `id`, `name`, `state`, `step`, `max_steps`, `labels`, `last` and `best` (each
      with `value`, `step`, `stderr`; null if not measured), and `is_best`.
    """
    by_metric = [outcomes.results(job) for job in jobs]
    metric = next((name for name in JUDGES if any(name in of_job for of_job in by_metric)), "")
    results = [
        replace(of_job[metric], job=job) if metric in of_job else Result(job, None, None)
        for job, of_job in zip(jobs, by_metric, strict=True)
    ]
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
