"""The Redis tier of the cache: rows that several teachers share through one server.

Each sequence is one value. The server may fail at any time in any way: a failure delays the lookups
in flight by at most 200 ms, and then Redis is skipped for 5 seconds. The Redis user needs only
GETRANGE, SET and DEL on `distill:*`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import redis.asyncio
import xxhash
from redis.exceptions import InvalidResponse, RedisError

from clients.store.store import StoredRows
from protos.errors import Corrupt
from protos.rows.codec import compress_rows, expand_rows, is_compressed
from teacher_service.cache.redis_address import OPTIONS, TIMEOUT_SECONDS, RedisAddress, check_access
from teacher_service.cache.tier import TierCounts

# A value: an envelope that identifies the rows, then the rows. Little-endian: magic "DRds",
# version u8, key [32], payload length u64, xxh3-128 of the payload [16], payload.
_MAGIC = b"DRds"
_VERSION = 1
_ENVELOPE = struct.Struct("<4sB32sQ16s")
ENVELOPE_BYTES = _ENVELOPE.size


def seal(key: bytes, payload: bytes) -> bytes:
    """Return the value to store under `key`: the envelope and `payload`.

    Little-endian: magic "DRds", version u8, key [32], payload length u64, xxh3-128 of the payload
    [16], payload.
    """
    return _envelope(key, payload) + payload


def unseal(key: bytes, value: bytes) -> bytes:
    """Return the payload of `value`. Raises Corrupt if `seal` did not make `value` for this key."""
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


class Breaker:
    """A circuit breaker: after a failure, it limits the attempts to use a server.

    The breaker is closed at first: every attempt is allowed. `trip` opens the breaker. An open
    breaker allows one attempt every `pause` seconds. `close` closes the breaker again. Not
    thread-safe.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._next_attempt: float | None = None

    @property
    def is_open(self) -> bool:
        """True after `trip`, until `close` is called."""
        return self._next_attempt is not None

    def allows(self) -> bool:
        """Return True if the caller may make an attempt now.

        If the breaker is open, the next attempt is then allowed only after `pause` seconds.
        """
        if self._next_attempt is None:
            return True
        now = time.monotonic()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._pause
        return True

    def trip(self) -> None:
        """Open the breaker; the next attempt is allowed after `pause` seconds."""
        self._next_attempt = time.monotonic() + self._pause

    def close(self) -> None:
        """Close the breaker: every attempt is allowed again."""
        self._next_attempt = None


log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
MAX_VALUE_BYTES = 16 << 20  # what a slow network transfers in 200 ms
MAX_UNWRITTEN_BYTES = 64 << 20
_BATCH_KEYS = 16
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Lookup:
    key: bytes
    max_bytes: int
    value: asyncio.Future[bytes]


@dataclass(frozen=True)
class _Change:
    """A write that is not sent to Redis yet. `rows` None means that the value is deleted."""

    key: bytes
    rows: bytes | None

    @property
    def size(self) -> int:
        return len(self.rows or b"")


class RedisTier:
    """A tier that stores rows in Redis.

    All lookups of one iteration of the event loop are sent in batches. Writes are made in the
    background. Stored values expire after `ttl_seconds`. With `zstd`, rows are compressed. Use this
    class from one event loop.
    """

    name = "redis"

    def __init__(self, address: RedisAddress, *, ttl_seconds: int, zstd: bool = False) -> None:
        """Check the access rights on the server. Blocks; each command takes at most 200 ms.

        Raises InvalidInput if the server denies access. If the server cannot be reached, a warning
        is logged, and later lookups try again.
        """
        self.counts = TierCounts()
        self._address = address
        self._ttl_seconds = ttl_seconds
        self._zstd = zstd
        self._reachable = Breaker(PAUSE_SECONDS)
        self._writable = Breaker(PAUSE_SECONDS)
        self._lookups: deque[_Lookup] = deque()
        self._changes: deque[_Change] = deque()
        self._unwritten_bytes = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        try:
            check_access(address)
        except (RedisError, OSError) as error:
            self._record_failure(error)
        self._client: Any = redis.asyncio.Redis.from_url(
            address.url, password=address.password, **OPTIONS
        )

    async def get(self, key: bytes, max_bytes: int) -> bytes | None:
        """Return the codec bytes of `key`, at most `max_bytes`, within about 200 ms.

        Returns None if there is no value, or if the server does not respond or is skipped.
        Raises Corrupt if the value is damaged or longer than 16 MiB.
        """
        if not self._reachable.allows():
            return None
        # Stored values never exceed MAX_VALUE_BYTES. `max_bytes` may be larger, because it is
        # computed for ids of the largest encoded size.
        longest = min(max_bytes + ENVELOPE_BYTES, MAX_VALUE_BYTES)
        lookup = _Lookup(key, longest, asyncio.get_running_loop().create_future())
        self._lookups.append(lookup)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                value = await lookup.value
        except TimeoutError:
            # Redis hangs (then `_read` fails too), or many lookups are ahead of this lookup.
            self.counts.errors += 1
            return None
        if not value:
            return None
        rows = unseal(key, value)
        if not is_compressed(rows):
            return rows
        return await asyncio.to_thread(expand_rows, rows, max_bytes)

    def put(self, entry: StoredRows) -> None:
        """Queue a write and return at once; an existing value is not replaced.

        The entry is dropped if its size is above 16 MiB, if Redis is skipped or refuses writes, or
        if more than 64 MiB wait to be written.
        """
        if len(entry.rows) + ENVELOPE_BYTES <= MAX_VALUE_BYTES and self._writable.allows():
            self._queue_change(_Change(entry.key, entry.rows))

    def drop(self, key: bytes) -> None:
        """Queue the deletion of a value and return at once."""
        self._queue_change(_Change(key, None))

    async def wait_until_written(self) -> None:
        """Wait until no write is queued."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Finish the queued lookups and writes, each within 1 s, then close the connection."""
        tasks = [task for task in (self._reader, self._writer) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._client.aclose()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("cache: cannot close the connection to %s: %r", self._address, error)

    async def _read(self) -> None:
        while self._lookups:
            batch = self._next_lookups()
            pipeline = self._client.pipeline(transaction=False)
            for lookup in batch:
                # GETRANGE includes its last index, so it returns one byte more than `max_bytes` of
                # a value that is too long: this shows the error without the whole transfer.
                pipeline.getrange(name_of(lookup.key), 0, lookup.max_bytes)
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    values = _require_bytes(await pipeline.execute())
                self._record_recovery()
            except (RedisError, OSError, TimeoutError) as error:
                self._record_failure(error)
                # The lookups in the queue would only wait for the same failure.
                batch += self._lookups
                self._lookups.clear()
                values = [b""] * len(batch)
            for lookup, value in zip(batch, values, strict=True):
                if not lookup.value.done():
                    lookup.value.set_result(value)

    def _next_lookups(self) -> list[_Lookup]:
        batch: list[_Lookup] = []
        size = 0
        while self._lookups and len(batch) < _BATCH_KEYS:
            size += self._lookups[0].max_bytes
            if batch and size > MAX_VALUE_BYTES:
                break
            batch.append(self._lookups.popleft())
        return batch

    def _queue_change(self, change: _Change) -> None:
        if self._reachable.is_open or self._unwritten_bytes + change.size > MAX_UNWRITTEN_BYTES:
            return
        self._unwritten_bytes += change.size
        self._changes.append(change)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._changes:
            change = self._changes.popleft()
            self._unwritten_bytes -= change.size
            try:
                await self._apply(change)
                self._record_recovery()
            except (RedisError, OSError, TimeoutError) as error:
                self._record_failure(error)
                self._changes.clear()
                self._unwritten_bytes = 0

    async def _apply(self, change: _Change) -> None:
        sealed_value = None
        if change.rows is not None:
            sealed_value = await asyncio.to_thread(self._seal_rows, change.key, change.rows)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if sealed_value is None:
                    await self._client.delete(name_of(change.key))
                else:
                    await self._client.set(
                        name_of(change.key), sealed_value, nx=True, ex=self._ttl_seconds
                    )
            self._writable.close()
        except redis.exceptions.ResponseError as error:
            # Redis is full, or has become a read-only replica: lookups still work.
            self.counts.errors += 1
            if not self._writable.is_open:
                log.warning("cache: %s refuses writes: %s", self._address, error)
            self._writable.trip()

    def _seal_rows(self, key: bytes, rows: bytes) -> bytes:
        return seal(key, compress_rows(rows) if self._zstd else rows)

    def _record_failure(self, error: Exception) -> None:
        self.counts.errors += 1
        if not self._reachable.is_open:
            reason = str(error) or "it does not respond in time"
            log.warning("cache: %s is skipped for %g s: %s", self._address, PAUSE_SECONDS, reason)
        self._reachable.trip()

    def _record_recovery(self) -> None:
        if self._reachable.is_open:
            log.info("cache: %s responds again", self._address)
            self._reachable.close()


def _require_bytes(values: list[object]) -> list[bytes]:
    """Return the replies to GETRANGE; raise InvalidResponse unless every reply is bytes."""
    byte_values = [value for value in values if isinstance(value, bytes)]
    if len(byte_values) != len(values):
        raise InvalidResponse("a reply does not match its command")
    return byte_values
