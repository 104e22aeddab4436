"""The standard error of an evaluation, and the warning about an unproven best step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from clients.runs.best_step import unproven_gain
from clients.runs.metrics_file import Point
from student_trainer.loop.evaluation import compute_moments, standard_error


def test_equal_lengths_give_the_error_of_a_mean() -> None:
    """With sequences of one length, it is s / sqrt(S) of their means."""
    sums = torch.from_numpy(np.random.default_rng(0).normal(3.0, 1.0, 50))
    counts = torch.full((50,), 7.0, dtype=torch.float64)
    error = standard_error(float(sums.sum()), 350.0, *compute_moments(sums, counts).tolist())
    assert error == pytest.approx(float((sums / 7).std()) / math.sqrt(50))


def test_it_is_the_spread_of_repeated_evaluations() -> None:
    """Sequences of many lengths, with correlated tokens."""
    random = np.random.default_rng(1)
    means, errors = [], []
    for _ in range(2000):
        counts = random.integers(1, 40, 64).astype(float)
        sums = counts * random.normal(1.0, 0.5, 64) + random.normal(0, np.sqrt(counts))
        of_it = compute_moments(torch.from_numpy(sums), torch.from_numpy(counts)).tolist()
        means.append(sums.sum() / counts.sum())
        errors.append(standard_error(sums.sum(), counts.sum(), *of_it))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_processes_add_their_moments() -> None:
    sums = torch.rand(9, dtype=torch.float64)
    counts = torch.tensor([3.0, 1, 2, 0, 5, 6, 1, 1, 4], dtype=torch.float64)
    halves = compute_moments(sums[:4], counts[:4]) + compute_moments(sums[4:], counts[4:])
    torch.testing.assert_close(halves, compute_moments(sums, counts))
    assert halves[-1] == 8, "a sequence without tokens is none"


def points(metric: str, *values: tuple[float, float]) -> list[Point]:
    metrics_by_step: list[dict[str, Any]] = [
        {metric: mean, f"{metric}_stderr": se} for mean, se in values
    ]
    return [Point(10 * number, metrics) for number, metrics in enumerate(metrics_by_step)]


def test_a_gain_within_the_error_is_said() -> None:
    """A gain of 0.03 with an error of 0.05 is not significant."""
    warning = unproven_gain(points("eval/kl", (0.20, 0.03), (0.17, 0.04)), 10)
    assert "eval/kl is 0.17 at the best step, 10, and 0.2 at step 0, which is not better" in warning
    assert "of the difference (0.1); raise eval.prompts" in warning
    assert unproven_gain(points("eval/kl", (0.20, 0.03), (0.05, 0.04)), 10) == ""
    assert unproven_gain(points("eval/kl", (0.05, 0.03), (0.20, 0.04)), 10) != "", "it got worse"
    assert unproven_gain(points("eval/reward", (0.05, 0.03), (0.20, 0.04)), 10) == ""
    assert unproven_gain(points("eval/kl", (0.20, 0.03)), 0) == "", "nothing to compare"
    assert unproven_gain([Point(0, {"eval/kl": 2.0}), Point(10, {"eval/kl": 1.0})], 10) == ""
