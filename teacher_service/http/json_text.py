"""Writes JSON text from arrays, without a Python object per number.

A text consists of parts. Each part is an array of characters, uint8 [..., width], and a mask of
those to keep; `join_parts` concatenates the parts of an entry and drops the masked characters. So
numbers of different lengths cost one selection in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The digits after the point of a log-prob. The error of 5e-10 nats is below the rounding of float32
# for log-probs under -0.016; those of likelier tokens matter by their absolute error.
DECIMALS = 9
# As vLLM writes a log-prob of -inf, which JSON does not have.
LOWEST_LOGPROB = -9999.0
_ZERO = ord("0")

Mask = NDArray[np.bool_]


class Part(NamedTuple):
    """Characters, uint8 [..., width], and which of them to keep; both broadcast over entries."""

    chars: NDArray[np.uint8]
    mask: Mask


def format_literal(text: bytes, mask: Mask | None = None) -> Part:
    """Return the part with the same text for every entry, or only for those in the mask [...]."""
    chars = np.frombuffer(text, np.uint8)
    return Part(chars, np.ones(len(chars), bool) if mask is None else mask[..., None])


def format_integers(values: NDArray[Any]) -> Part:
    """Return the digits of integers of shape [...], from 0 to 10^9 - 1, without leading zeros."""
    width = len(str(int(values.max(initial=0))))
    chars = _format_digits(values, width)
    is_shown = values[..., None] >= 10 ** np.arange(width - 1, -1, -1)
    is_shown[..., -1] = True
    return Part(chars, is_shown)


def format_logprobs(values: NDArray[np.floating[Any]]) -> tuple[Part, ...]:
    """Return the parts of log-probs of shape [...], in nats, as -I.FFFFFFFFF.

    Values below LOWEST_LOGPROB are written as that, values above 0 (rounding) as -0.
    """
    scaled = np.clip(values.astype(np.float64), LOWEST_LOGPROB, 0.0) * -(10.0**DECIMALS)
    integer_part, fraction = np.divmod(np.rint(scaled).astype(np.int64), 10**DECIMALS)
    digits = Part(_format_digits(fraction, DECIMALS), np.ones(DECIMALS, bool))
    return format_literal(b"-"), format_integers(integer_part), format_literal(b"."), digits


def join_parts(shape: tuple[int, ...], parts: Sequence[Part]) -> bytes:
    """Return the text of entries [*shape], in order; each is made of the parts, in order."""
    chars = _concatenate_columns(shape, [part.chars for part in parts], parts)
    mask = _concatenate_columns(shape, [part.mask for part in parts], parts)
    text: bytes = chars.reshape(-1)[mask.reshape(-1)].tobytes()
    return text


def _concatenate_columns(
    shape: tuple[int, ...], columns: Sequence[NDArray[Any]], parts: Sequence[Part]
) -> NDArray[Any]:
    """Return the columns of all parts, [*shape, width]; those shared by all entries cost least."""
    widths = [part.chars.shape[-1] for part in parts]
    ends = np.cumsum(widths).tolist()
    table = np.empty((*shape, ends[-1]), columns[0].dtype)
    shared_columns = [
        column if column.ndim == 1 else np.zeros(width, column.dtype)
        for column, width in zip(columns, widths, strict=True)
    ]
    table[...] = np.concatenate(shared_columns)
    for column, width, end in zip(columns, widths, ends, strict=True):
        if column.ndim > 1:
            table[..., end - width : end] = column
    return table


def _format_digits(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """Return the last `width` <= 9 decimal digits, uint8 [..., width]."""
    digits = np.empty((*values.shape, width), np.uint8)
    remaining_digits = values.astype(np.uint32)
    for place in range(width - 1, -1, -1):
        shifted = remaining_digits // 10
        digits[..., place] = remaining_digits - 10 * shifted + _ZERO
        remaining_digits = shifted
    return digits
