"""Random numbers of a row: decided by a seed and the tokens before the row's, and by nothing else.
No batch, order, start of the rows or restart changes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery

_GOLDEN = 0x9E3779B97F4A7C15


def uniforms_of(query: ScoreQuery) -> NDArray[np.float64]:
    """[rows, tail_samples] in [0, 1)."""
    seed = splitmix64(np.array([query.seed], np.uint64))
    before = query.token_ids[:-1].astype(np.uint64)
    # A prefix is the sum of one hash for each place and token in it: all prefixes in one pass.
    placed = np.arange(len(before), dtype=np.uint64) << np.uint64(32) | before
    prefixes = splitmix64(seed + np.cumsum(splitmix64(seed + placed)))[query.start - 1 :]
    numbers = np.arange(1, query.tail_samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = splitmix64(prefixes[:, None] + numbers)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of that generator: a bijection in which each bit of `x` changes half of all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
