"""Estimates compared with enumeration, and the coverage of confidence intervals."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from student_trainer.exam.report import estimate, estimate_share, majority, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_draws_that_pass(n: int) -> None:
    rights = np.array([[i < c for i in range(n)] for c in range(n + 1)])
    for k in range(1, n + 1):
        has_pass = [
            [any(right[list(draw)]) for draw in combinations(range(n), k)] for right in rights
        ]
        np.testing.assert_allclose(
            pass_at_k(rights, k), np.mean(has_pass, 1), rtol=1e-12, atol=1e-15
        )


def test_pass_at_k_of_many_answers_stays_finite() -> None:
    right = np.zeros((2, 5000), dtype=bool)
    right[0, 0] = True
    np.testing.assert_allclose(pass_at_k(right, 2500), [0.5, 0.0], rtol=1e-9)


@pytest.mark.parametrize(
    ("votes", "right", "expected"),
    [
        (["4", "4", "5"], [1, 1, 0], 1.0),
        (["4", "5", "5"], [1, 0, 0], 0.0),
        (["4", "5"], [1, 0], 0.5),  # a tie
        (["4", "5", "6"], [1, 0, 0], 1 / 3),
        (["", "", "4"], [0, 0, 1], 1.0),  # an empty answer is no vote
        (["", ""], [0, 0], 0.0),
    ],
)
def test_majority(votes: list[str], right: list[int], expected: float) -> None:
    assert majority([votes], np.array([right], dtype=bool)) == pytest.approx([expected])


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """120 data sets of 60 prompts with a known mean: about 95% of the intervals contain it."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(120):
        interval = estimate(random.binomial(8, random.beta(2, 3, 60)) / 8)
        covered += interval.low <= 0.4 <= interval.high
        assert interval.low <= interval.mean <= interval.high
    assert 0.90 <= covered / 120 <= 0.99


def test_an_interval_of_equals_is_a_point() -> None:
    interval = estimate(np.full(7, 0.25))
    assert (interval.mean, interval.low, interval.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # statsmodels.stats.proportion.proportion_confint(right, count, method="wilson")
    [(0, 8, 0.0, 0.324406), (8, 8, 0.675594, 1.0), (3, 10, 0.107789, 0.603222)],
)
def test_a_share_of_few_prompts(right: int, count: int, low: float, high: float) -> None:
    interval = estimate_share(np.array([1.0] * right + [0.0] * (count - right)))
    assert interval.mean == right / count
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-5)


def test_a_share_of_several_answers_has_the_interval_over_prompts() -> None:
    values = np.array([0.25, 0.5, 1.0, 0.0])
    assert estimate_share(values) == estimate(values)
