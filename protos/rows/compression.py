"""zstd for the payload of a block of rows, after a change of order that it finds patterns in.

Log-probs fall along a row, so each is stored as its step from the one before (of the bits, taken as
integers: exact); and of all numbers of a plane first the lowest bytes, then the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from protos.errors import Corrupt

LEVEL = 1


class Plane(NamedTuple):
    """A matrix of the payload: n rows of `columns` numbers of `width` bytes, in steps or not."""

    rows: int
    columns: int
    width: int
    steps: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.width

    @property
    def dtype(self) -> str:
        return f"<u{self.width}"


def compress(payload: memoryview, planes: Sequence[Plane]) -> bytes:
    """`planes` cover the payload, in order."""
    parts: list[NDArray[np.uint8]] = []
    at = 0
    for plane in planes:
        numbers = np.frombuffer(payload, plane.dtype, plane.nbytes // plane.width, at)
        if plane.steps:
            numbers = _steps(numbers.reshape(plane.rows, plane.columns))
        # The cast keeps the lowest byte.
        parts += [(numbers >> 8 * byte).astype(np.uint8) for byte in range(plane.width)]
        at += plane.nbytes
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.concatenate(parts).data)


def expand(data: memoryview, planes: Sequence[Plane]) -> bytes:
    """The payload that `compress` was given. Raises Corrupt."""
    size = sum(plane.nbytes for plane in planes)
    try:
        # Before memory is taken for what a damaged frame promises.
        if zstandard.frame_content_size(data) != size:
            raise Corrupt(f"a compressed block of rows does not expand to {size} bytes")
        by_byte = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed block of rows does not expand: {error}") from error
    return b"".join(part.tobytes() for part in _numbers(by_byte, planes))


def _numbers(by_byte: bytes, planes: Sequence[Plane]) -> Sequence[NDArray[Any]]:
    found = []
    at = 0
    for plane in planes:
        count = plane.rows * plane.columns
        numbers = np.zeros(count, plane.dtype)
        for byte in reversed(range(plane.width)):
            numbers <<= 8 if plane.width > 1 else 0
            numbers |= np.frombuffer(by_byte, np.uint8, count, at + byte * count)
        if plane.steps:
            rows = numbers.reshape(plane.rows, plane.columns)
            numbers = np.add.accumulate(rows, axis=1, dtype=plane.dtype)
        found.append(numbers)
        at += plane.nbytes
    return found


def _steps(rows: NDArray[Any]) -> NDArray[Any]:
    steps = rows.copy()
    steps[:, 1:] -= rows[:, :-1]
    return steps.reshape(-1)
