"""Writes JSON text from arrays, without a Python object per number.

A text is made of parts. Each part is an array of characters, uint8 [..., width], and a mask of
those to keep; `joined` puts the parts of an entry side by side and leaves out what is not kept. So
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
    kept: Mask


def literal(text: bytes, kept: Mask | None = None) -> Part:
    """Return the same text for every entry, or for those of the mask [...] only."""
    chars = np.frombuffer(text, np.uint8)
    return Part(chars, np.ones(len(chars), bool) if kept is None else kept[..., None])


def integers(values: NDArray[Any]) -> Part:
    """Return the digits of integers of shape [...], from 0 to 10^9 - 1, without leading zeros."""
    width = len(str(int(values.max(initial=0))))
    chars = _digits(values, width)
    shown = values[..., None] >= 10 ** np.arange(width - 1, -1, -1)
    shown[..., -1] = True
    return Part(chars, shown)


def logprobs(values: NDArray[np.floating[Any]]) -> tuple[Part, ...]:
    """Return the parts of log-probs of shape [...], in nats, as -I.FFFFFFFFF.

    Values below LOWEST_LOGPROB are written as that, values above 0 (rounding) as -0.
    """
    scaled = np.clip(values.astype(np.float64), LOWEST_LOGPROB, 0.0) * -(10.0**DECIMALS)
    whole, fraction = np.divmod(np.rint(scaled).astype(np.int64), 10**DECIMALS)
    digits = Part(_digits(fraction, DECIMALS), np.ones(DECIMALS, bool))
    return literal(b"-"), integers(whole), literal(b"."), digits


def joined(shape: tuple[int, ...], parts: Sequence[Part]) -> bytes:
    """Return the text of entries [*shape], in order; each is made of the parts, in order."""
    chars = _side_by_side(shape, [part.chars for part in parts], parts)
    kept = _side_by_side(shape, [part.kept for part in parts], parts)
    text: bytes = chars.reshape(-1)[kept.reshape(-1)].tobytes()
    return text


def _side_by_side(
    shape: tuple[int, ...], columns: Sequence[NDArray[Any]], parts: Sequence[Part]
) -> NDArray[Any]:
    """Return the columns of all parts, [*shape, width]; what is the same everywhere costs least."""
    widths = [part.chars.shape[-1] for part in parts]
    ends = np.cumsum(widths).tolist()
    found = np.empty((*shape, ends[-1]), columns[0].dtype)
    same = [
        one if one.ndim == 1 else np.zeros(width, one.dtype)
        for one, width in zip(columns, widths, strict=True)
    ]
    found[...] = np.concatenate(same)
    for one, width, end in zip(columns, widths, ends, strict=True):
        if one.ndim > 1:
            found[..., end - width : end] = one
    return found


def _digits(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """Return the last `width` <= 9 decimal digits, uint8 [..., width]."""
    digits = np.empty((*values.shape, width), np.uint8)
    rest = values.astype(np.uint32)
    for column in range(width - 1, -1, -1):
        shifted = rest // 10
        digits[..., column] = rest - 10 * shifted + _ZERO
        rest = shifted
    return digits
