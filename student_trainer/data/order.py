"""The order of training data: a pure function of the seed, so that a run resumes without state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray


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


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) int64, the same on every machine.

    Epoch -1 selects held-out data. The result is cached: do not modify it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    order: NDArray[np.int64] = torch.randperm(size, generator=generator).numpy()
    return order
