"""What many answers to each prompt say of a model, with intervals over prompts.

Every estimate is a mean over prompts of something of one prompt's answers; the intervals are of the
bootstrap that draws prompts. [P, n] stands for n answers to each of P prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def pass_at_k(right: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """[P]: the chance that k of a prompt's n answers, drawn without replacement, have a right one.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of Chen et al. (arXiv 2107.03374), with c right
    answers; k <= n.
    """
    n = right.shape[1]
    assert 1 <= k <= n, "there are not so many answers"
    wrong = n - right.sum(1)
    # Of k draws, draw number j finds only wrong ones with chance (wrong - j) / (n - j).
    drawn = np.arange(k)
    chances = np.clip(wrong[:, None] - drawn, 0, None) / (n - drawn)
    found: NDArray[np.float64] = 1 - chances.prod(1)
    return found


def majority(votes: Sequence[Sequence[str]], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[P]: whether what most of a prompt's answers say is right. Of equals, one is drawn: their
    mean counts. An empty vote is none; without any, the answer is wrong.
    """
    return np.array([_elected(*one) for one in zip(votes, right, strict=True)], np.float64)


def estimate(values: NDArray[np.float64]) -> Estimate:
    """Of values [P], one a prompt; always the same for the same values."""
    random = np.random.default_rng(0)
    means = [values[random.integers(len(values), size=len(values))].mean() for _ in range(_DRAWS)]
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def _elected(votes: Sequence[str], right: NDArray[np.bool_]) -> float:
    said: dict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, right, strict=True):
        if vote:
            said[vote].append(bool(is_right))
    most = max(map(len, said.values()), default=0)
    # Answers with one text are judged alike, but by some rewards of a user's.
    first = [float(np.mean(group)) for group in said.values() if len(group) == most]
    return float(np.mean(first)) if first else 0.0
