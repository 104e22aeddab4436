"""Fit scale and cap from a few values; None for any other function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.data.models.scale_and_cap import PROBE, fit_scale_and_cap

Numbers = NDArray[np.float32]


def scale_and_cap(scale: float, cap: float) -> Callable[[Numbers], Numbers]:
    """Return tanh(z * scale / cap) * cap in float32, as a model computes it."""
    s, c = np.float32(scale), np.float32(cap)
    return lambda z: np.tanh(z * s / c) * c


@pytest.mark.parametrize("scale", [1.0, 0.0625, 1 / 6, 12.0])
@pytest.mark.parametrize("cap", [None, 15.0, 30.0, 50.0])
def test_found(scale: float, cap: float | None) -> None:
    function = (lambda z: z * np.float32(scale)) if cap is None else scale_and_cap(scale, cap)
    fitted = fit_scale_and_cap(PROBE, function(PROBE))
    assert fitted is not None
    assert fitted[0] == pytest.approx(scale, rel=1e-6)
    assert fitted[1] == (None if cap is None else pytest.approx(cap, rel=1e-6))
    if scale == 1:
        assert fitted[0] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda z: -z,
        lambda z: 0 * z,
        lambda z: z + 1,
        lambda z: z.clip(-30, 30),
        lambda z: 30 * z / (30 + abs(z)),
        lambda z: np.where(z > 0, z, 2 * z),
        lambda z: z * np.nan,
        lambda z: z**3,
        lambda z: scale_and_cap(1.0, 30.0)(z) + np.where(z > 100, 1e-2, 0),
    ],
)
def test_another_function(function: Callable[[Numbers], Numbers]) -> None:
    with np.errstate(all="ignore"):
        assert fit_scale_and_cap(PROBE, function(PROBE).astype(np.float32)) is None


def test_too_few_values() -> None:
    assert fit_scale_and_cap(PROBE[:-2], PROBE[:-2]) is None
