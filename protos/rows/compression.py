"""Compression of the payload of a row block with zstd. The bytes are first put in another order.

Log-probs decrease along a row, so each log-prob is replaced by its difference from the previous
log-prob. The difference is computed between the bit patterns as integers, so it is exact. Then the
bytes of a plane are put in groups: the lowest byte of every number, then the next byte of every
number, and so on.
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
    """The size of a matrix in the payload: [rows, columns] numbers of `width` bytes each.

    If `steps` is True, each number is replaced by its difference from the number to its left.
    """

    rows: int
    columns: int
    width: int
    steps: bool = False

    @property
    def nbytes(self) -> int:
        """Uncompressed size in bytes."""
        return self.rows * self.columns * self.width

    @property
    def dtype(self) -> str:
        """NumPy type to read the numbers as: unsigned little-endian integers of the same width."""
        return f"<u{self.width}"


def compress(payload: memoryview, planes: Sequence[Plane]) -> bytes:
    """Compress `payload`. `planes`: the planes of the whole payload, in order."""
    parts: list[NDArray[np.uint8]] = []
    offset = 0
    for plane in planes:
        numbers = np.frombuffer(payload, plane.dtype, plane.nbytes // plane.width, offset)
        if plane.steps:
            numbers = _differences(numbers.reshape(plane.rows, plane.columns))
        # The cast keeps the lowest byte.
        parts += [(numbers >> 8 * byte).astype(np.uint8) for byte in range(plane.width)]
        offset += plane.nbytes
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.concatenate(parts).data)


def expand(data: memoryview, planes: Sequence[Plane]) -> bytes:
    """Return the payload that `compress` compressed with the same planes.

    Raises Corrupt if the data is damaged.
    """
    size = sum(plane.nbytes for plane in planes)
    try:
        # Check the size first: a damaged frame could claim any size, and memory would be reserved.
        if zstandard.frame_content_size(data) != size:
            raise Corrupt(f"a compressed block of rows does not expand to {size} bytes")
        by_byte = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed block of rows does not expand: {error}") from error
    return b"".join(part.tobytes() for part in _restore_numbers(by_byte, planes))


def _restore_numbers(by_byte: bytes, planes: Sequence[Plane]) -> Sequence[NDArray[Any]]:
    columns = []
    offset = 0
    for plane in planes:
        count = plane.rows * plane.columns
        numbers = np.zeros(count, plane.dtype)
        for byte in reversed(range(plane.width)):
            numbers <<= 8 if plane.width > 1 else 0
            numbers |= np.frombuffer(by_byte, np.uint8, count, offset + byte * count)
        if plane.steps:
            rows = numbers.reshape(plane.rows, plane.columns)
            numbers = np.add.accumulate(rows, axis=1, dtype=plane.dtype)
        columns.append(numbers)
        offset += plane.nbytes
    return columns


def _differences(rows: NDArray[Any]) -> NDArray[Any]:
    steps = rows.copy()
    steps[:, 1:] -= rows[:, :-1]
    return steps.reshape(-1)
