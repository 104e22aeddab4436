"""Removes the stores of other teachers from the cache directory when its disk limit is reached."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from clients.store.store import remove_store
from protos.errors import DistillError

log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, order=True)
class _Store:
    last_used: float
    path: Path
    bytes: int


def remove_oldest(root: Path, *, keep: Path, room: int) -> int:
    """Remove stores in `root`, the least recently used first, until the others fit in `room` bytes.

    The store `keep` is neither removed nor counted. A store that another teacher has open is
    skipped: that teacher bounds its own size. Returns the number of sequences that were removed.
    """
    stores = sorted(_list_stores(root, keep))
    total = sum(store.bytes for store in stores)
    removed = 0
    for store in stores:
        if total <= room:
            break
        total -= store.bytes
        try:
            removed += remove_store(store.path)
            log.info("cache: removed %s, %d MiB of another teacher", store.path, store.bytes >> 20)
        except (DistillError, OSError) as error:
            log.info("cache: %s is not removed: %s", store.path, error)
    return removed


def _list_stores(root: Path, keep: Path) -> list[_Store]:
    stores = []
    for lock in root.glob("*/lock"):
        path = lock.parent
        if path == keep or not _NAME.fullmatch(path.name):
            continue
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            stores.append(_Store(lock.stat().st_mtime, path, size))
        except FileNotFoundError:
            continue  # another teacher is removing it
    return stores
