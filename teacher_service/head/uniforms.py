"""Random numbers of the draws from the tail.

They are a hash of the seed and the tokens before a row. They do not depend on the batch, the order
of queries, the first row of a query or restarts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery

_GOLDEN = 0x9E3779B97F4A7C15


def uniforms_of(query: ScoreQuery) -> NDArray[np.float64]:
    """Return the uniforms of each row of `query`, float64 [rows, tail_samples] in [0, 1)."""
    seed = splitmix64(np.array([query.seed], np.uint64))
    preceding_ids = query.token_ids[:-1].astype(np.uint64)
    # The hash of a prefix is the sum of one hash per (place, token): all prefixes in one pass.
    positioned_ids = np.arange(len(preceding_ids), dtype=np.uint64) << np.uint64(32) | preceding_ids
    prefixes = splitmix64(seed + np.cumsum(splitmix64(seed + positioned_ids)))[query.start - 1 :]
    numbers = np.arange(1, query.tail_samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = splitmix64(prefixes[:, None] + numbers)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of the SplitMix64 generator, elementwise.

    It is a bijection of uint64: flipping one bit of `x` flips about half of the bits of the result.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
