"""The newest and the best value of a metric of a job."""

from __future__ import annotations

import pytest

from clients.jobs.job import Job, JobState
from clients.jobs.results import (
    Measurement,
    differing_labels,
    judging_metric,
    result_of,
    verdict_of,
)
from clients.runs.metrics_file import Point


def make_job(**labels: str) -> Job:
    return Job("x", "x", "rl", JobState.RUNNING, "", "", 1, 3, 9, 0, 0, 0, 1, labels=labels)


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("eval/kl", Measurement(2, 1.0)),
        ("eval/reward", Measurement(3, 4.0, 0.5)),
        ("eval/pass@8", Measurement(3, 4.0)),
        ("eval/anchor/kl", Measurement(2, 1.0)),
        ("loss", None),
        ("eval/length", None),
    ],
)
def test_best_by_the_direction_of_the_metric(metric: str, best: Measurement | None) -> None:
    values = {1: 1.0, 2: 1.0, 3: 4.0, 4: 2.0}  # for equal values, the later step is the best one
    points = [Point(step, {metric: value}) for step, value in values.items()]
    points[2].metrics["eval/reward_stderr"] = 0.5  # type: ignore[index]
    result = result_of(make_job(), [*points, Point(5, {"other": 9.0})], metric)
    assert result.last == Measurement(4, 2.0)
    assert result.best == best


def test_nothing_measured() -> None:
    result = result_of(make_job(), [], "eval/kl")
    assert result.last is result.best is None


def test_the_metric_that_chooses_checkpoints() -> None:
    histories = [[Point(1, {"eval/kl": 1.0, "loss": 1.0})], [Point(1, {"eval/reward": 1.0})], []]
    assert judging_metric(histories) == "eval/reward"
    assert judging_metric(histories[:1]) == "eval/kl"
    assert judging_metric([[Point(1, {"loss": 1.0})]]) == ""


def test_labels_that_differ() -> None:
    jobs = [make_job(b="1", a="1", c="1"), make_job(b="2", a="1")]
    assert differing_labels(jobs) == ["b", "c"]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({}, ""),
        ({5: 2.0}, "eval/kl: 2 at step 5."),
        ({1: 2.0, 5: 1.0}, "eval/kl: 2 at step 1, 1 at step 5; step 5 is the best."),
        ({1: 2.0, 5: 3.0}, "eval/kl: 2 at step 1, 3 at step 5; step 1 is the best."),
        ({1: 2.0, 3: 0.5, 5: 1.0}, "eval/kl: 2 at step 1, 1 at step 5; best 0.5 at step 3."),
    ],
)
def test_the_verdict_of_the_evaluations(values: dict[int, float], verdict: str) -> None:
    points = [Point(step, {"eval/kl": value}) for step, value in values.items()]
    assert verdict_of(make_job(), points) == verdict
    uncertain = [Point(step, {"eval/kl": 2.0 - step, "eval/kl_stderr": 9.0}) for step in (0, 1)]
    assert "step 1 is the best. No gain is shown: eval/kl is 1 at" in verdict_of(
        make_job(), uncertain
    )
