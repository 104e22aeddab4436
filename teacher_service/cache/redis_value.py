"""What is stored in Redis under a key: the rows in an envelope that says whose they are.

magic "DRds", version u8, the key [32], length u64 of the payload and its xxh3-128; the payload
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
    """The value of `key`."""
    return _envelope(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes:
    """The payload. Raises Corrupt for bytes that were not sealed for this very key."""
    payload = value[ENVELOPE_BYTES:]
    if value[:ENVELOPE_BYTES] != _envelope(key, payload):
        raise Corrupt(f"a value of {len(value)} bytes is not what was stored under its key")
    return payload


def _envelope(key: bytes, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128_digest(payload)
    return _ENVELOPE.pack(_MAGIC, _VERSION, key, len(payload), digest)


def name_of(key: bytes) -> str:
    """The key's name in Redis."""
    return f"distill:{key.hex()}"
