"""Metrics as (sum, number), so that their means over processes are exact."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_and_count(values: Tensor, applies: bool = True) -> Tensor:
    """Return (sum, number) of `values` [N] as a tensor [2]; (0, 0) if not `applies`."""
    values = values if applies else values[:0]
    return torch.stack([values.sum(), values.new_tensor(len(values))])
