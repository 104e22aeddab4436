"""Estimates from many answers to each prompt, with intervals over prompts.

Every estimate is a mean over prompts of a statistic of one prompt's answers. The intervals come
from a bootstrap that resamples prompts, or from Wilson's formula if every prompt is right or wrong.
Shapes: [P, n] are n answers to each of P prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000
_LEVEL = 0.95
_Z = 1.959964  # the standard normal distribution has _LEVEL of its mass within +- _Z


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def pass_at_k(right: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Return pass@k of each prompt, [P]: the chance that k of its n answers include a right one.

    1 - C(n - c, k) / C(n, k) for c right answers: the unbiased estimate of Chen et al. (arXiv
    2107.03374). `right`: [P, n] bool; 1 <= k <= n.
    """
    n = right.shape[1]
    assert 1 <= k <= n, "there are not so many answers"
    wrong = n - right.sum(1)
    # Without replacement, draw j is wrong again with chance (wrong - j) / (n - j).
    draw_index = np.arange(k)
    wrong_chances = np.clip(wrong[:, None] - draw_index, 0, None) / (n - draw_index)
    chances: NDArray[np.float64] = 1 - wrong_chances.prod(1)
    return chances


def majority(votes: Sequence[Sequence[str]], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return whether the majority vote of each prompt's answers is right, [P].

    Ties count as the mean over the tied votes. Empty votes are not counted; a prompt without any
    vote is wrong. `right`: [P, n] bool.
    """
    return np.array(
        [_score_vote(*votes_and_right) for votes_and_right in zip(votes, right, strict=True)],
        np.float64,
    )


def estimate(values: NDArray[np.float64]) -> Estimate:
    """Return the mean of values [P], one per prompt, with its interval; deterministic."""
    generator = np.random.default_rng(0)
    means = [
        values[generator.integers(len(values), size=len(values))].mean() for _ in range(_DRAWS)
    ]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def estimate_share(values: NDArray[np.float64]) -> Estimate:
    """Return the mean of values [P] between 0 and 1, with its interval; deterministic.

    If all values are 0 or 1, the interval is Wilson's (JASA 22, 1927), which never has length 0: a
    bootstrap of 8 zeros would claim that the share is exactly 0. Otherwise as `estimate`.
    """
    if not np.isin(values, (0.0, 1.0)).all():
        return estimate(values)
    n, mean = len(values), float(values.mean())
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half_width = _Z * np.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return Estimate(
        mean, max(float(center - half_width), 0.0), min(float(center + half_width), 1.0)
    )


def _score_vote(votes: Sequence[str], right: NDArray[np.bool_]) -> float:
    right_by_vote: dict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, right, strict=True):
        if vote:
            right_by_vote[vote].append(bool(is_right))
    highest_count = max(map(len, right_by_vote.values()), default=0)
    # Equal votes are usually scored alike, but a user's reward may score them differently.
    winning_scores = [
        float(np.mean(group)) for group in right_by_vote.values() if len(group) == highest_count
    ]
    return float(np.mean(winning_scores)) if winning_scores else 0.0
