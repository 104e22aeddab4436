"""Detects whether a model scales or caps the output of its head. Does not import torch.

Some models scale the output z of the head, logit = s z, or cap it, logit = c tanh(s z / c). A probe
replaces the output of the head by the values of PROBE and reads the logits. Small values give the
scale s, large values the cap c, and all values show whether the model applies another function.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Powers of two, exact in every dtype. The smallest gives the slope at 0 to 1e-6 for caps above 1,
# and the largest exceeds any cap.
_EXPONENTS = np.arange(-10.0, 21.0, 2.0)
PROBE: NDArray[np.float32] = np.concatenate(
    [[0.0], *([2.0**power, -(2.0**power)] for power in _EXPONENTS)]
).astype(np.float32)

_TOLERANCE = 1e-5


def fit_scale_and_cap(
    products: NDArray[np.float32], logits: NDArray[np.float32]
) -> tuple[float, float | None] | None:
    """Return (s, c) with logits = c tanh(s products / c), or (s, None) with logits = s products.

    `products` and `logits` have the same shape. Returns None if no s > 0 and c > 0 fit every value
    to 1e-5, or if `products` lacks a value of PROBE.
    """
    z, f = products.ravel().astype(np.float64), logits.ravel().astype(np.float64)
    if not np.isin(PROBE, products).all():
        return None
    smallest_probe, largest_probe = float(PROBE[1]), float(PROBE[-2])
    scale = float(f[z == smallest_probe].mean() / smallest_probe)
    limit = float(f[z == largest_probe].mean())
    if not 0 < scale < np.inf or not 0 < limit < np.inf:
        return None
    cap = None
    if abs(limit - scale * largest_probe) > 1e-3 * limit:
        cap = limit
    if abs(scale - 1) < _TOLERANCE:
        scale = 1.0  # exactly, so that nothing is multiplied
    fitted = scale * z if cap is None else cap * np.tanh(scale * z / cap)
    return (scale, cap) if np.allclose(f, fitted, rtol=_TOLERANCE, atol=0) else None
