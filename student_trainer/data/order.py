"""The order of prompts, and their division among data sets by shares: pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

# Indices of records or stored sequences.
Indices: TypeAlias = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class EpochOrder:
    """Indices 0 to size - 1 in an order fixed by the seed; each epoch has another permutation."""

    size: int
    seed: int

    def of_step(self, step: int, count: int) -> list[int]:
        """Return the `count` indices of `step` (from 1), independent of earlier calls."""
        first = (step - 1) * count
        return [self._index_at(index) for index in range(first, first + count)]

    def _index_at(self, index: int) -> int:
        epoch, position = divmod(index, self.size)
        return int(permutation(self.size, self.seed, epoch)[position])


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> Indices:
    """Return a permutation of range(size), the same on every machine: int32 if that suffices.

    Training uses the epochs from 0 on. Negative epochs are other permutations of the same seed, for
    selections that must not follow the training order: the held-out data are the first indices of
    epoch -1, and the records that are checked before training those of epoch -2. The result is
    cached: do not modify it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    order = torch.randperm(size, generator=generator).numpy()
    return order.astype(np.int32 if size < 2**31 else np.int64)


def count_per_set(shares: Sequence[Fraction], total: int) -> list[int]:
    """Return how many of the first `total` prompts come from each data set.

    `shares`: positive, with the sum 1. The counts follow Webster's method (Balinski and Young, Fair
    Representation, 1982): no count falls when `total` rises, so that each data set is consumed in
    order.
    """
    # Webster's counts are never further below the exact shares than the number of data sets.
    counts = [max(0, math.floor(share * total) - len(shares)) for share in shares]
    _add_prompts(shares, counts, total - sum(counts))
    return counts


def assign_sets(shares: Sequence[Fraction], first: int, count: int) -> list[int]:
    """Return the data set's index for each of `count` prompts from number `first` (from 0) on.

    A data set's prompts are spread evenly. For `shares`, see `count_per_set`.
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
