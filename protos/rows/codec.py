"""The binary format of rows, used on the wire, in the caches and on disk.

A *row* describes one scored position. It has the log-probs of k head ids, the log of the tail mass,
and the log-prob of the sampled token. It may also have M tail samples: ids that the teacher drew
from outside the head. A *block* has the n rows of consecutive positions of one sequence. A block is
stored as planes (all ids, then all log-probs, ...), so decoding needs one `frombuffer` per plane
and no Python object per token.

Layout, little-endian:

    header   32 bytes: magic "DRow", version u8, flags u8, M u16, k u32, n u32, then the xxh3-128
             of these 16 bytes and the payload
    ids      u16 [n*k] low bits, then 2 high bits per id, four ids per byte (18-bit ids, vocabulary
             of at most 262,144); or i32 [n*k] (flag WIDE_IDS);
             or nothing (HAS_IDS not set: the reader chose the ids and has them)
    logprobs f16 [n*k], or f32 (flag F32)
    tail     f32 [n]   log of the tail mass; -inf if the head is the whole vocabulary
    token    f32 [n]   log-prob of the sampled token
    samples  ids [n*M] in the format of `ids`, then f32 [n], the mean of their log-probs; nothing if
             M = 0
    draws    instead of samples, with flag DRAWS: f16 [n*M] or f32 log-probs of the reader's ids

Bytes per row with f16 and 18-bit ids:

- head, tail and token: 2.25 k + 2 k + 8, which is 280 at k = 64; 2 k + 8 if the reader has the ids
- tail samples: 2.25 M + 4 more, so a row has 39 bytes at k = 0 and M = 12
- tail draws: 2 M more

With the flag ZSTD, the payload is compressed (`compression.py`). Blocks with draws have version 2,
and all other blocks have version 1. Older programs, which do not know draws, can therefore read all
blocks without draws.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from protos.errors import Corrupt
from protos.rows import compression as row_compression
from protos.rows.compression import Plane

MAGIC = b"DRow"
VERSION = 1
_DRAWS_VERSION = 2
MAX_18_BIT_ID = (1 << 18) - 1

_PREFIX = struct.Struct("<4sBBHII")
_DIGEST_BYTES = 16
HEADER_BYTES = _PREFIX.size + _DIGEST_BYTES

_FLAGS_AT = 5
_HAS_IDS, _WIDE_IDS, _F32, _ZSTD, _DRAWS = 1, 2, 4, 8, 16
# Maps each byte of the 2-bit plane to the high bits of its four ids, already shifted by 16.
_HIGH_BITS = (np.arange(256)[:, None] >> 2 * np.arange(4) & 3).astype(np.int32) << 16


@dataclass(frozen=True)
class RowBlock:
    """Rows of n consecutive positions, with k head ids each.

    All log-probs are of the softmax over the full vocabulary, in nats.

    - `head_ids`: int32 [n, k]; None if the reader of the block chose the ids and has them
    - `head_logprobs`: float16 or float32 [n, k]
    - `tail_logmass`: float32 [n], the log of the tail mass
    - `token_logprobs`: float32 [n], the log-probs of the sampled tokens
    - `tail_sample_ids`: int32 [n, M], drawn with replacement from the distribution outside the
      head; None without tail samples
    - `tail_sample_logprob`: float32 [n], the mean log-prob of the tail samples; None without them
    - `draw_logprobs`: float16 or float32 [n, M], the log-probs of ids that the student drew from
      its own tail; the student keeps these ids. None without draws.
    """

    head_ids: NDArray[np.int32] | None
    head_logprobs: NDArray[np.floating[Any]]
    tail_logmass: NDArray[np.float32]
    token_logprobs: NDArray[np.float32]
    tail_sample_ids: NDArray[np.int32] | None = None
    tail_sample_logprob: NDArray[np.float32] | None = None
    draw_logprobs: NDArray[np.floating[Any]] | None = None

    def __len__(self) -> int:
        return len(self.tail_logmass)

    @property
    def k(self) -> int:
        """Number of head ids per row; may be 0."""
        return int(self.head_logprobs.shape[1])

    @property
    def tail_samples(self) -> int:
        """Number of tail samples per row (M), which the teacher drew; 0 without samples."""
        return 0 if self.tail_sample_ids is None else int(self.tail_sample_ids.shape[1])

    @property
    def tail_draws(self) -> int:
        """Number of tail draws per row (M), which the student drew; 0 without draws."""
        return 0 if self.draw_logprobs is None else int(self.draw_logprobs.shape[1])

    def slice(self, first: int, last: int) -> RowBlock:
        """Return rows [first, last) as views of the same arrays."""
        return RowBlock(
            *(_select_rows(column, slice(first, last)) for column in _column_values(self))
        )

    def take(self, places: NDArray[np.int64]) -> RowBlock:
        """Return copies of the rows at the indices `places`, in that order."""
        return RowBlock(*(_select_rows(column, places) for column in _column_values(self)))


def concatenate(blocks: list[RowBlock]) -> RowBlock:
    """Join blocks with the same k and M into one block, in order."""
    return RowBlock(*map(_join_columns, zip(*map(_column_values, blocks), strict=True)))


def _column_values(block: RowBlock) -> list[Any]:
    return [getattr(block, column.name) for column in fields(block)]


def _select_rows(column: Any, places: slice | NDArray[np.int64]) -> Any:
    return None if column is None else column[places]


def _join_columns(parts: Sequence[Any]) -> Any:
    present_parts = [part for part in parts if part is not None]
    assert len(present_parts) in (0, len(parts)), "a column must be in all blocks or in none"
    return np.concatenate(present_parts) if present_parts else None


def encode_rows(block: RowBlock, *, f32: bool = False) -> bytes:
    """Encode a block. If `f32` is False, log-probs of the head and of draws are rounded to float16.

    In float16, a log-prob below -65,504 becomes -inf. Raises ValueError if an id is negative, or if
    the block has both tail samples and tail draws.
    """
    n, k = block.head_logprobs.shape
    flags, logprob = (_F32, "<f4") if f32 else (0, "<f2")
    if block.tail_samples and block.tail_draws:
        raise ValueError("a block has tail samples or tail draws, not both")
    heads = _flatten_ids(block.head_ids)
    samples = _flatten_ids(block.tail_sample_ids)
    if heads is not None:
        flags |= _HAS_IDS
    if any(_needs_32_bits(ids) for ids in (heads, samples) if ids is not None):
        flags |= _WIDE_IDS
    planes: list[bytes] = []
    if heads is not None:
        planes.extend(_pack_ids(heads, flags))
    with np.errstate(over="ignore"):
        planes.append(block.head_logprobs.astype(logprob).tobytes())
    planes.append(block.tail_logmass.astype("<f4").tobytes())
    planes.append(block.token_logprobs.astype("<f4").tobytes())
    if samples is not None and block.tail_sample_logprob is not None:
        planes.extend(_pack_ids(samples, flags))
        planes.append(block.tail_sample_logprob.astype("<f4").tobytes())
    if block.draw_logprobs is not None and block.tail_draws:
        flags |= _DRAWS
        with np.errstate(over="ignore"):
            planes.append(block.draw_logprobs.astype(logprob).tobytes())
    return _add_header(
        _Header(flags, block.tail_samples or block.tail_draws, k, n), b"".join(planes)
    )


def compress_rows(data: bytes) -> bytes:
    """Compress an encoded block with zstd. Return `data` itself if the result is not smaller.

    A compressed block takes longer to decode. Raises Corrupt if `data` is damaged.
    """
    header, payload = _check_header(data)
    if header.flags & _ZSTD:
        return data
    smaller = row_compression.compress(payload, header.planes())
    compressed = _add_header(header.with_flags(header.flags | _ZSTD), smaller)
    return compressed if len(compressed) < len(data) else data


def is_compressed(data: bytes) -> bool:
    """Return True if the header says that the payload is compressed. Checks nothing else."""
    return len(data) >= HEADER_BYTES and bool(data[_FLAGS_AT] & _ZSTD)


def expand_rows(data: bytes, max_bytes: int) -> bytes:
    """Return the encoded block that `compress_rows` compressed, equal in every byte.

    Data that is not compressed is returned without a check. Raises Corrupt if the data is damaged,
    or if the result would be larger than `max_bytes` bytes.
    """
    if not is_compressed(data):
        return data
    header, payload = _check_header(data, max_bytes)
    expanded = row_compression.expand(payload, header.planes())
    return _add_header(header.with_flags(header.flags & ~_ZSTD), expanded)


def verify_rows(data: bytes) -> None:
    """Check an encoded block without expanding it.

    Raises Corrupt if the bytes are damaged, incomplete, or of another version of the codec.
    """
    _check_header(data)


def decode_rows(data: bytes | memoryview, max_bytes: int) -> RowBlock:
    """Check and decode the output of `encode_rows` or `compress_rows`.

    `max_bytes`: the maximum size of the block, both as it is in `data` and after expansion; see
    `max_encoded_bytes`. The size is checked before the payload is expanded. The arrays are views of
    `data` where the layout allows it, so they may be read-only.

    Raises Corrupt if the block is incomplete, damaged, too large, or of another version of the
    codec.
    """
    header, payload = _check_header(data, max_bytes)
    flags, samples, k, n = header
    if flags & _ZSTD:
        payload = memoryview(row_compression.expand(payload, header.planes()))
    heads: NDArray[np.int32] | None = None
    at = 0
    if flags & _HAS_IDS:
        heads = _unpack_ids(payload, n * k, flags).reshape(n, k)
        at = _ids_bytes(n * k, flags)
    logprobs = np.frombuffer(payload, "<f4" if flags & _F32 else "<f2", n * k, at).reshape(n, k)
    at += logprobs.nbytes
    tail = np.frombuffer(payload, "<f4", n, at)
    at += tail.nbytes
    token = np.frombuffer(payload, "<f4", n, at)
    at += token.nbytes
    if not samples:
        return RowBlock(heads, logprobs, tail, token)
    if flags & _DRAWS:
        draw_logprobs = np.frombuffer(payload, logprobs.dtype, n * samples, at).reshape(n, samples)
        return RowBlock(heads, logprobs, tail, token, draw_logprobs=draw_logprobs)
    sample_ids = _unpack_ids(payload[at:], n * samples, flags).reshape(n, samples)
    sample_logprob = np.frombuffer(payload, "<f4", n, at + _ids_bytes(n * samples, flags))
    return RowBlock(heads, logprobs, tail, token, sample_ids, sample_logprob)


def max_encoded_bytes(n: int, k: int, samples: int = 0) -> int:
    """Return the largest possible size in bytes of an encoded block of n rows.

    `k`: head ids per row. `samples`: tail samples or tail draws per row.
    """
    return HEADER_BYTES + _Header(_HAS_IDS | _WIDE_IDS | _F32, samples, k, n).payload_bytes


class _Header(NamedTuple):
    """The fields of a block's header that describe the payload, in the order of the bytes."""

    flags: int
    samples: int
    k: int
    n: int

    def __str__(self) -> str:
        kind = "draws" if self.flags & _DRAWS else "samples"
        suffix = f" and {self.samples} {kind}" if self.samples else ""
        return f"{self.n} rows with k = {self.k}{suffix}"

    def with_flags(self, flags: int) -> _Header:
        return self._replace(flags=flags)

    @property
    def payload_bytes(self) -> int:
        """Size of the uncompressed payload."""
        return sum(plane.nbytes for plane in self.planes())

    def planes(self) -> list[Plane]:
        """Return the planes of the uncompressed payload, in order."""
        flags, samples, k, n = self
        width = 4 if flags & _F32 else 2
        planes = [Plane(n, k, width, steps=True), Plane(2, n, 4)]
        if flags & _HAS_IDS:
            planes = [*_id_planes(n, k, flags), *planes]
        if flags & _DRAWS:
            planes.append(Plane(n, samples, width))
        elif samples:
            planes += [*_id_planes(n, samples, flags), Plane(1, n, 4)]
        return planes


def _add_header(header: _Header, payload: bytes) -> bytes:
    flags, samples, k, n = header
    version = _DRAWS_VERSION if flags & _DRAWS else VERSION
    prefix = _PREFIX.pack(MAGIC, version, flags, samples, k, n)
    return prefix + _checksum(prefix, payload) + payload


def _check_header(
    data: bytes | memoryview, max_bytes: int | None = None
) -> tuple[_Header, memoryview]:
    """Check the sizes, the version and the checksum of a block. Return its header and payload."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise Corrupt(
            f"a block of rows is truncated: {len(view)} bytes, but the header has {HEADER_BYTES}"
        )
    magic, version, *header_fields = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise Corrupt("these bytes are not a block of rows")
    header = _Header(*header_fields)
    if version != (_DRAWS_VERSION if header.flags & _DRAWS else VERSION):
        raise Corrupt(
            f"rows of codec version {version}; this program reads versions {VERSION} and"
            f" {_DRAWS_VERSION}"
        )
    payload = view[HEADER_BYTES:]
    expected_bytes = header.payload_bytes
    if max_bytes is not None and HEADER_BYTES + expected_bytes > max_bytes:
        raise Corrupt(f"a block of {header} takes more than {max_bytes} bytes")
    if len(payload) != expected_bytes and not header.flags & _ZSTD:
        raise Corrupt(f"a block of {header} has {expected_bytes} payload bytes, got {len(payload)}")
    if _checksum(view[: _PREFIX.size], payload) != view[_PREFIX.size : HEADER_BYTES]:
        raise Corrupt("a block of rows does not match its checksum")
    return header, payload


def _checksum(prefix: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(prefix)
    hasher.update(payload)
    return hasher.digest()


def _id_planes(rows: int, columns: int, flags: int) -> list[Plane]:
    if flags & _WIDE_IDS:
        return [Plane(rows, columns, 4)]
    return [Plane(rows, columns, 2), Plane(1, (rows * columns + 3) // 4, 1)]


def _ids_bytes(count: int, flags: int) -> int:
    return sum(plane.nbytes for plane in _id_planes(1, count, flags))


def _flatten_ids(ids: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    return None if ids is None else np.ascontiguousarray(ids, dtype="<i4").reshape(-1)


def _needs_32_bits(ids: NDArray[np.int32]) -> bool:
    # As unsigned numbers, negative ids are the largest, so one pass finds wide and negative ids.
    if not ids.size or ids.view("<u4").max() <= MAX_18_BIT_ID:
        return False
    if ids.min() < 0:
        raise ValueError(f"ids must not be negative, got {ids.min()}")
    return True


def _pack_ids(ids: NDArray[np.int32], flags: int) -> tuple[bytes, ...]:
    return (ids.tobytes(),) if flags & _WIDE_IDS else _pack_18_bit(ids)


def _unpack_ids(payload: memoryview, count: int, flags: int) -> NDArray[np.int32]:
    if flags & _WIDE_IDS:
        return np.frombuffer(payload, "<i4", count)
    return _unpack_18_bit(payload, count)


def _pack_18_bit(ids: NDArray[np.int32]) -> tuple[bytes, bytes]:
    low = ids.astype("<u2")  # keeps the low 16 bits
    high = np.zeros(-(-ids.size // 4) * 4, dtype=np.uint8)
    high[: ids.size] = ids.view(np.uint8)[2::4]
    quads = high.view("<u4")  # each byte holds two bits; move all of them into the lowest byte
    packed = (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8)
    return low.tobytes(), packed.tobytes()


def _unpack_18_bit(payload: memoryview, count: int) -> NDArray[np.int32]:
    low = np.frombuffer(payload, "<u2", count)
    packed = np.frombuffer(payload, np.uint8, (count + 3) // 4, low.nbytes)
    flat = _HIGH_BITS.take(packed, axis=0).reshape(-1)[:count]
    flat |= low
    return flat
