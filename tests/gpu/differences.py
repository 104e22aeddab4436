"""The relative difference of two tensors, and the size of a check on this machine."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Size = TypeVar("Size")


def relative_difference(values: Tensor, exact: Tensor) -> float:
    """Return |values - exact| / |exact|, as Frobenius norms in float64."""
    values, exact = values.double().cpu(), exact.double().cpu()
    return float((values - exact).norm() / exact.norm().clamp(min=1e-30))


def by_device(gpu: Size, cpu: Size) -> Size:
    """Return the size of a check on a GPU, or the one on a CPU if there is no GPU."""
    return gpu if torch.cuda.is_available() else cpu
