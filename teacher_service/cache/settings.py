"""Builds the row cache from the command-line options and the environment."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from clients.runs.file_system import create_private
from protos.errors import DistillError, InvalidInput
from teacher_service.cache.disk_tier import DiskTier
from teacher_service.cache.redis_address import RedisAddress
from teacher_service.cache.redis_tier import RedisTier
from teacher_service.cache.row_cache import RowCache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """The cache options of `distill-teacher`.

    - directory: the disk tier has its stores there.
    - redis_url: None means the environment variable DISTILL_REDIS_URL, if it is set.
    - zstd: True compresses rows on disk and in Redis.
    """

    directory: Path
    memory_bytes: int
    disk_bytes: int
    zstd: bool
    redis_url: str | None
    redis_ttl_seconds: int


def open_redis(settings: CacheSettings) -> RedisTier | None:
    """Return the Redis tier, or None if no URL is configured.

    The password comes from DISTILL_REDIS_PASSWORD, or from the URL in DISTILL_REDIS_URL. Raises
    InvalidInput if the URL is wrong, if --redis-url contains a password, or if the server denies
    access.
    """
    url = settings.redis_url or os.environ.get("DISTILL_REDIS_URL")
    if not url:
        return None
    address = RedisAddress(url, os.environ.get("DISTILL_REDIS_PASSWORD"))
    if settings.redis_url and urlsplit(url).password is not None:
        raise InvalidInput(
            "the password is visible on the command line to every user of this machine",
            field="--redis-url",
            hint="remove the password from the URL and set DISTILL_REDIS_PASSWORD",
        )
    return RedisTier(address, ttl_seconds=settings.redis_ttl_seconds, zstd=settings.zstd)


def make_cache(settings: CacheSettings, redis: RedisTier | None, fingerprint: str) -> RowCache:
    """Return the cache for the teacher with this fingerprint.

    If the disk tier cannot be opened, a warning is logged and the cache has no disk tier.
    """
    disk = None
    try:
        create_private(settings.directory)
        disk = DiskTier(
            settings.directory,
            fingerprint=fingerprint,
            max_bytes=settings.disk_bytes,
            zstd=settings.zstd,
        )
    except (DistillError, OSError) as error:
        log.warning("cache: rows are not kept on disk: %s", error)
    return RowCache(memory_bytes=settings.memory_bytes, redis=redis, disk=disk)
