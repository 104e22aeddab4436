"""Divides prompts among data sets by their shares: a pure function of the shares."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


def count_per_set(shares: Sequence[Fraction], total: int) -> list[int]:
    """Return how many of the first `total` prompts come from each data set.

    `shares`: positive, with the sum 1. The counts are those of Webster's method (Balinski and
    Young, Fair Representation, 1982): no count falls when `total` rises, so that each data set is
    consumed in order.
    """
    # Webster's counts are never further below the exact shares than the number of data sets.
    counts = [max(0, math.floor(share * total) - len(shares)) for share in shares]
    _add_prompts(shares, counts, total - sum(counts))
    return counts


def assign_sets(shares: Sequence[Fraction], first: int, count: int) -> list[int]:
    """Return the data set's index for each of `count` prompts from number `first` (from 0) on.

    A data set's prompts are spread evenly. `shares`: as in `count_per_set`.
    """
    return _add_prompts(shares, count_per_set(shares, first), count)


def _add_prompts(shares: Sequence[Fraction], counts: list[int], count: int) -> list[int]:
    """Add `count` prompts to `counts` in place, and return the data set of each."""
    numbers = range(len(shares))
    queue = [((2 * counts[number] + 1) / shares[number], number) for number in numbers]
    heapq.heapify(queue)
    chosen_sets = []
    for _ in range(count):
        _, number = queue[0]
        counts[number] += 1
        heapq.heapreplace(queue, ((2 * counts[number] + 1) / shares[number], number))
        chosen_sets.append(number)
    return chosen_sets
