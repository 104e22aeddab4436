"""Tells transformers whether a line has several sequences, so that it need not read the GPU.

Each forward pass of transformers builds a mask, and first reads the position ids from the device
to see whether sequences are packed into lines. The host then waits for all queued operations, once
per micro-batch and kind of mask. A batch knows the answer from its layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers import masking_utils

# None outside of `known_packing`: transformers reads the position ids.
_is_packed: ContextVar[bool | None] = ContextVar("is_packed", default=None)


@contextmanager
def known_packing(is_packed: bool) -> Iterator[None]:
    """Build the masks of forward passes in this context without reading position ids.

    `is_packed`: whether a line of the batch has several sequences. Applies to this thread.
    """
    token = _is_packed.set(is_packed)
    try:
        yield
    finally:
        _is_packed.reset(token)


_find_by_reading = masking_utils.find_packed_sequence_indices


def _find_packed_sequences(position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's sequence in its line, [B, T]; None: one per line."""
    is_packed = _is_packed.get()
    if is_packed is None:
        numbers: Tensor | None = _find_by_reading(position_ids)
        return numbers
    if not is_packed:
        return None
    # A position that does not follow the one before begins a sequence.
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = _find_packed_sequences
