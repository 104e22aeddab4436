"""The format of a value in Redis: an envelope that identifies the rows, then the rows.

Little-endian: magic "DRds", version u8, key [32], payload length u64, xxh3-128 of the payload [16],
payload.
"""

from __future__ import annotations

import struct

import xxhash

from protos.errors import Corrupt

_MAGIC = b"DRds"
_VERSION = 1
_ENVELOPE = struct.Struct("<4sB32sQ16s")
ENVELOPE_BYTES = _ENVELOPE.size


def seal(key: bytes, payload: bytes) -> bytes:
    """Return the value to store under `key`: the envelope and `payload`."""
    return _envelope(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes:
    """Return the payload of `value`. Raises Corrupt if `value` was not sealed for this key."""
    payload = value[ENVELOPE_BYTES:]
    if value[:ENVELOPE_BYTES] != _envelope(key, payload):
        raise Corrupt(f"a value of {len(value)} bytes does not match its key and checksum")
    return payload


def _envelope(key: bytes, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128_digest(payload)
    return _ENVELOPE.pack(_MAGIC, _VERSION, key, len(payload), digest)


def name_of(key: bytes) -> str:
    """Return the name of `key` in Redis."""
    return f"distill:{key.hex()}"
