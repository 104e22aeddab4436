"""Tells transformers whether a line of a batch contains several sequences. This avoids a wait.

Each forward pass of transformers builds masks. For each kind of mask, transformers reads the
position ids from the GPU to find out whether lines contain several sequences. The host then waits
for all queued operations, in every micro-batch. The layout of a batch already contains the answer.
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
    """In this context, transformers builds masks without reading the position ids from the GPU.

    `is_packed`: whether a line of the batch contains several sequences. The context applies to
    forward passes of this thread.
    """
    token = _is_packed.set(is_packed)
    try:
        yield
    finally:
        _is_packed.reset(token)


_find_by_reading = masking_utils.find_packed_sequence_indices


def _find_packed_sequences(position_ids: Tensor) -> Tensor | None:
    """Return, for each token, the number of its sequence in its line, [B, T].

    Returns None if each line contains one sequence. Replaces the function of transformers that
    reads the position ids.
    """
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
