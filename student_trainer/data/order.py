"""In which order data is learned: a pure function of the seed, so that a resume needs no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Order:
    """`size` items in an order that a seed decides; every epoch has another one."""

    size: int
    seed: int

    def of_step(self, step: int, count: int) -> list[int]:
        """The `count` items of optimizer step `step` (from 1), whatever ran before."""
        first = (step - 1) * count
        return [self._at(index) for index in range(first, first + count)]

    def _at(self, index: int) -> int:
        epoch, place = divmod(index, self.size)
        return int(permutation(self.size, self.seed, epoch)[place])


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Of range(size), the same on every machine; epoch -1 splits off what is held out."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    order: NDArray[np.int64] = torch.randperm(size, generator=generator).numpy()
    return order
