"""The one codec of rows: on the wire, in the caches and on disk.

A *row* describes one scored position: the log-probs of k head ids, the log of the mass outside the
head, and the log-prob of the actual token. A block holds the n rows of consecutive positions of one
sequence, as planes (all ids, then all log-probs, ...): one `frombuffer` a plane, no Python object
per token.

Layout, little-endian:

    header   magic "DRow", version u8, flags u8, reserved u16, k u32, n u32, and the xxh3-128 of
             these 16 bytes and the payload: 32 bytes
    ids      u16 [n*k] low bits, then 2 high bits an id, four to a byte (18-bit ids: V <= 262,144)
             or i32 [n*k] (flag WIDE_IDS)
             or nothing (no flag HAS_IDS: the reader chose them)
    logprobs f16 [n*k], or f32 (flag F32)
    tail     f32 [n]   log of the mass outside the head; -inf when the head is the whole vocabulary
    token    f32 [n]   log-prob of the actual token

280 bytes a token at k = 64 with f16 and 18-bit ids: 2.25 k + 2 k + 8, less the ids that the reader
already has. With the flag ZSTD the payload is compressed (`row_compression.py`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from protos import row_compression
from protos.errors import Corrupt
from protos.row_compression import Plane

MAGIC = b"DRow"
VERSION = 1
MAX_18_BIT_ID = (1 << 18) - 1

_PREFIX = struct.Struct("<4sBBHII")
_DIGEST_BYTES = 16
HEADER_BYTES = _PREFIX.size + _DIGEST_BYTES

_FLAGS_AT = 5
_HAS_IDS, _WIDE_IDS, _F32, _ZSTD = 1, 2, 4, 8
# Of the 2-bit plane: the four ids that share a byte, from 0.
_HIGH_BITS = (np.arange(256)[:, None] >> 2 * np.arange(4) & 3).astype(np.int32) << 16


@dataclass(frozen=True)
class RowBlock:
    """Rows of n consecutive positions with k head ids each.

    head_ids int32 [n, k], or None where the reader chose the ids itself; head_logprobs float16 or
    float32 [n, k]; tail_logmass and token_logprobs float32 [n]. In nats, over the full vocabulary.
    """

    head_ids: NDArray[np.int32] | None
    head_logprobs: NDArray[np.floating[Any]]
    tail_logmass: NDArray[np.float32]
    token_logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tail_logmass)

    @property
    def k(self) -> int:
        return int(self.head_logprobs.shape[1])

    def slice(self, first: int, last: int) -> RowBlock:
        """Rows [first, last) as views."""
        return RowBlock(
            head_ids=None if self.head_ids is None else self.head_ids[first:last],
            head_logprobs=self.head_logprobs[first:last],
            tail_logmass=self.tail_logmass[first:last],
            token_logprobs=self.token_logprobs[first:last],
        )


def concatenate(blocks: list[RowBlock]) -> RowBlock:
    """The rows of several blocks of the same k, in order."""
    ids = [block.head_ids for block in blocks if block.head_ids is not None]
    assert len(ids) in (0, len(blocks)), "blocks with and without ids"
    return RowBlock(
        head_ids=np.concatenate(ids) if ids else None,
        head_logprobs=np.concatenate([block.head_logprobs for block in blocks]),
        tail_logmass=np.concatenate([block.tail_logmass for block in blocks]),
        token_logprobs=np.concatenate([block.token_logprobs for block in blocks]),
    )


def encode_rows(block: RowBlock, *, f32: bool = False) -> bytes:
    """Pack a block; log-probs are rounded to f16 unless `f32`.

    A log-prob under f16's range (-65,504) becomes -inf. Raises ValueError on a negative id.
    """
    n, k = block.head_logprobs.shape
    flags = _F32 if f32 else 0
    planes: list[bytes] = []
    if block.head_ids is not None:
        flags |= _HAS_IDS
        ids = np.ascontiguousarray(block.head_ids, dtype="<i4").reshape(-1)
        # Without a sign the negative ones are the largest of all: one pass finds either.
        if ids.size and ids.view("<u4").max() > MAX_18_BIT_ID:
            if ids.min() < 0:
                raise ValueError(f"head ids must not be negative, got {ids.min()}")
            flags |= _WIDE_IDS
            planes.append(ids.tobytes())
        else:
            planes.extend(_pack_18_bit(ids))
    with np.errstate(over="ignore"):
        planes.append(block.head_logprobs.astype("<f4" if f32 else "<f2").tobytes())
    planes.append(block.tail_logmass.astype("<f4").tobytes())
    planes.append(block.token_logprobs.astype("<f4").tobytes())
    return _seal(flags, k, n, b"".join(planes))


def compress_rows(data: bytes) -> bytes:
    """The same rows in fewer bytes, for whom space is dearer than time; `data` itself if there are
    none fewer.
    """
    flags, k, n, payload = _open(data)
    if flags & _ZSTD:
        return data
    compressed = _seal(flags | _ZSTD, k, n, row_compression.compress(payload, _planes(n, k, flags)))
    return compressed if len(compressed) < len(data) else data


def is_compressed(data: bytes) -> bool:
    """Whether `expand_rows` has anything to do, by the header alone."""
    return len(data) >= HEADER_BYTES and bool(data[_FLAGS_AT] & _ZSTD)


def expand_rows(data: bytes, max_bytes: int) -> bytes:
    """What `compress_rows` was given, to the byte. Raises Corrupt, also when it was more than
    `max_bytes`. What is not compressed comes back as it is, unchecked.
    """
    if not is_compressed(data):
        return data
    flags, k, n, payload = _open(data)
    flags &= ~_ZSTD
    if HEADER_BYTES + _payload_bytes(n, k, flags) > max_bytes:
        raise Corrupt(f"a block of {n} rows with k = {k} takes more than {max_bytes} bytes")
    return _seal(flags, k, n, row_compression.expand(payload, _planes(n, k, flags)))


def decode_rows(data: bytes | memoryview) -> RowBlock:
    """Check and unpack what `encode_rows` or `compress_rows` made; arrays are views of the bytes
    where they can be.

    Raises Corrupt when the bytes are cut, changed, or of another version.
    """
    flags, k, n, payload = _open(data)
    if flags & _ZSTD:
        payload = memoryview(row_compression.expand(payload, _planes(n, k, flags)))
    ids: NDArray[np.int32] | None = None
    at = _ids_bytes(n * k, flags)
    if flags & _WIDE_IDS:
        ids = np.frombuffer(payload, "<i4", n * k).reshape(n, k)
    elif flags & _HAS_IDS:
        ids = _unpack_18_bit(payload, n * k).reshape(n, k)
    logprobs = np.frombuffer(payload, "<f4" if flags & _F32 else "<f2", n * k, at).reshape(n, k)
    at += logprobs.nbytes
    tail = np.frombuffer(payload, "<f4", n, at)
    token = np.frombuffer(payload, "<f4", n, at + tail.nbytes)
    return RowBlock(head_ids=ids, head_logprobs=logprobs, tail_logmass=tail, token_logprobs=token)


def most_bytes(n: int, k: int) -> int:
    """That a block of n rows with k ids can take, however it is encoded."""
    return HEADER_BYTES + _payload_bytes(n, k, _HAS_IDS | _WIDE_IDS | _F32)


def _seal(flags: int, k: int, n: int, payload: bytes) -> bytes:
    prefix = _PREFIX.pack(MAGIC, VERSION, flags, 0, k, n)
    return prefix + _digest(prefix, payload) + payload


def _open(data: bytes | memoryview) -> tuple[int, int, int, memoryview]:
    """Flags, k, n and the payload, all of it checked."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise Corrupt(
            f"a block of rows is cut short: {len(view)} bytes, its header alone has {HEADER_BYTES}"
        )
    magic, version, flags, reserved, k, n = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise Corrupt("these bytes are not a block of rows")
    if version != VERSION:
        raise Corrupt(f"rows of codec version {version}; this program reads version {VERSION}")
    payload = view[HEADER_BYTES:]
    expected = _payload_bytes(n, k, flags)
    if (len(payload) != expected and not flags & _ZSTD) or reserved:
        raise Corrupt(
            f"a block of {n} rows with k = {k} has {expected} payload bytes, got {len(payload)}"
        )
    if _digest(view[: _PREFIX.size], payload) != view[_PREFIX.size : HEADER_BYTES]:
        raise Corrupt("a block of rows does not match its checksum")
    return flags, k, n, payload


def _digest(prefix: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(prefix)
    hasher.update(payload)
    return hasher.digest()


def _ids_bytes(count: int, flags: int) -> int:
    if flags & _WIDE_IDS:
        return 4 * count
    return 2 * count + (count + 3) // 4 if flags & _HAS_IDS else 0


def _payload_bytes(n: int, k: int, flags: int) -> int:
    return _ids_bytes(n * k, flags) + n * k * (4 if flags & _F32 else 2) + 8 * n


def _planes(n: int, k: int, flags: int) -> list[Plane]:
    """Of a payload without the flag ZSTD."""
    planes = [Plane(n, k, 4 if flags & _F32 else 2, steps=True), Plane(2, n, 4)]
    if flags & _WIDE_IDS:
        return [Plane(n, k, 4), *planes]
    if flags & _HAS_IDS:
        return [Plane(n, k, 2), Plane(1, (n * k + 3) // 4, 1), *planes]
    return planes


def _pack_18_bit(ids: NDArray[np.int32]) -> tuple[bytes, bytes]:
    low = ids.astype("<u2")  # keeps the low 16 bits
    high = np.zeros(-(-ids.size // 4) * 4, dtype=np.uint8)
    high[: ids.size] = ids.view(np.uint8)[2::4]
    quads = high.view("<u4")  # two bits in each byte, to be moved into the lowest one
    packed = (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8)
    return low.tobytes(), packed.tobytes()


def _unpack_18_bit(payload: memoryview, count: int) -> NDArray[np.int32]:
    low = np.frombuffer(payload, "<u2", count)
    packed = np.frombuffer(payload, np.uint8, (count + 3) // 4, low.nbytes)
    flat = _HIGH_BITS.take(packed, axis=0).reshape(-1)[:count]
    flat |= low
    return flat
