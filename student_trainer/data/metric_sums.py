"""Metrics as (sum, number), so that means over processes are exact."""

from __future__ import annotations

import torch
from torch import Tensor


def counted(values: Tensor, applies: bool = True) -> Tensor:
    """(sum, number), or nothing."""
    values = values if applies else values[:0]
    return torch.stack([values.sum(), values.new_tensor(len(values))])
