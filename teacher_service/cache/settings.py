"""Which tiers the cache of a teacher has, and where they are."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from protos.errors import DistillError, InvalidInput
from teacher_service.cache.disk_tier import DiskTier
from teacher_service.cache.redis_address import RedisAddress
from teacher_service.cache.redis_tier import RedisTier
from teacher_service.cache.row_cache import RowCache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """The options of the cache. `redis_url` None: the environment may have one."""

    directory: Path
    memory_bytes: int
    disk_bytes: int
    zstd: bool
    redis_url: str | None
    redis_ttl_seconds: int


def open_redis(settings: CacheSettings) -> RedisTier | None:
    """None without an address. Raises InvalidInput, also when the server refuses us."""
    url = settings.redis_url or os.environ.get("DISTILL_REDIS_URL")
    if not url:
        return None
    address = RedisAddress(url, os.environ.get("DISTILL_REDIS_PASSWORD"))
    if settings.redis_url and urlsplit(url).password is not None:
        raise InvalidInput(
            "everyone on this machine can read the password of a command line",
            field="--redis-url",
            hint="leave it out of the URL and set DISTILL_REDIS_PASSWORD",
        )
    return RedisTier(address, ttl_seconds=settings.redis_ttl_seconds, zstd=settings.zstd)


def make_cache(settings: CacheSettings, redis: RedisTier | None, fingerprint: str) -> RowCache:
    """The cache of the teacher with that fingerprint; without a disk tier where there can be
    none.
    """
    disk = None
    try:
        disk = DiskTier(
            settings.directory,
            fingerprint=fingerprint,
            max_bytes=settings.disk_bytes,
            zstd=settings.zstd,
        )
    except (DistillError, OSError) as error:
        log.warning("cache: rows are not kept on disk: %s", error)
    return RowCache(memory_bytes=settings.memory_bytes, redis=redis, disk=disk)
