"""A reimplementation of DistillKit's layout of stored log-probs, from its published description.

The first `exact` log-probs are stored in bfloat16. The others are a least-squares fit over their
rank, with float32 coefficients. The ids are a bit string with ceil(log2 V) bits each. Its README
recommends k = 128 (`RECOMMENDED`) and has a smaller layout (`BUDGET`).
https://github.com/arcee-ai/DistillKit
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ID_BITS = 18  # of a vocabulary of 151,936


@dataclass(frozen=True)
class Layout:
    """The parameters of the layout. The fit's terms are powers of the rank and its square root."""

    k: int
    exact: int
    powers: tuple[int, ...]

    @property
    def terms(self) -> NDArray[np.float64]:
        """Return the values of the fit's terms, [k - exact, terms]."""
        rank = np.arange(self.k - self.exact, dtype=np.float64)
        return np.stack([*(rank**power for power in self.powers), np.sqrt(rank)], axis=1)


RECOMMENDED = Layout(k=128, exact=16, powers=(0, 1, 2, 3, 4))
BUDGET = Layout(k=50, exact=1, powers=(0, 1))


def compress(
    layout: Layout, ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encode sorted ids and log-probs [n, k]; return the bytes of log-probs and ids by row."""
    fitted = logprobs[:, layout.exact :].astype(np.float64) @ np.linalg.pinv(layout.terms).T
    # bfloat16 is the upper half of a float32, rounded.
    upper = (logprobs[:, : layout.exact].view(np.uint32) + 0x8000 >> 16).astype("<u2")
    curve = fitted.astype("<f4")
    bits = (ids[:, :, None] >> np.arange(ID_BITS) & 1).astype(np.uint8)
    return (
        np.concatenate([upper.view(np.uint8), curve.view(np.uint8)], axis=1),
        np.packbits(bits.reshape(len(ids), -1), axis=1, bitorder="little"),
    )


def decompress(
    layout: Layout, values: NDArray[np.uint8], packed: NDArray[np.uint8]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Decode ids and log-probs [n, k]; the log-probs are approximate."""
    count = len(values)
    upper = np.ascontiguousarray(values[:, : 2 * layout.exact]).view("<u2")
    curve = np.ascontiguousarray(values[:, 2 * layout.exact :]).view("<f4")
    exact = (upper.astype(np.uint32) << 16).view(np.float32)
    fitted = curve @ layout.terms.T.astype(np.float32)
    bits = np.unpackbits(packed, axis=1, count=layout.k * ID_BITS, bitorder="little")
    ids = bits.reshape(count, layout.k, ID_BITS) @ (1 << np.arange(ID_BITS, dtype=np.int32))
    return ids.astype(np.int32), np.concatenate([exact, fitted], axis=1)
