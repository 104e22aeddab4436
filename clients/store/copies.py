"""Reading a store at a URL: its manifest alone, or a verified copy of all files in the cache.

A copy is a store on a disk, in `$XDG_CACHE_HOME/distill/stores` under the sha256 of its manifest,
so that a store is copied once, and one that has changed is copied again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from pathlib import Path

from clients.data.object_urls import is_object_url
from clients.store.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from clients.store.objects import ObjectFolder
from clients.store.shards import ShardFacts, write_synced
from protos.errors import Corrupt, NotFound

log = logging.getLogger(__name__)


def manifest_at(place: Path | str) -> Manifest:
    """Return the manifest of a store at a path or URL.

    Raises NotFound if there is no store, Corrupt if the manifest is damaged, and what ObjectFolder
    raises.
    """
    found = (
        ObjectFolder(str(place)).manifest() if is_object_url(place) else read_manifest(Path(place))
    )
    if found is None:
        raise _no_store(place)
    return found


def on_disk(place: Path | str) -> Path:
    """Return the directory of a store: a path itself, or for a URL a copy of all its files.

    Each file is verified when it is copied. Several processes may call this at the same time: one
    copies. Raises NotFound if there is no store at the URL, Corrupt if a file is missing or
    damaged, OSError if the disk is full, and what ObjectFolder raises.
    """
    if not is_object_url(place):
        return Path(place)
    folder = ObjectFolder(str(place))
    data = folder.read(MANIFEST)
    if data is None:
        raise _no_store(place)
    manifest = parse_manifest(data, str(place))
    copy = _cache() / hashlib.sha256(data).hexdigest()
    copy.mkdir(parents=True, exist_ok=True)
    with (copy / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [facts for facts in manifest.shards if not _is_there(copy, facts)]
        if missing:
            size = sum(facts.bytes for facts in missing) / 2**20
            log.info("copying %d files (%.0f MiB) of %s to %s", len(missing), size, place, copy)
        for facts in missing:
            partial = copy / f"{facts.name}.tmp"
            if folder.digest(facts.name, partial) != facts.sha256:
                partial.unlink(missing_ok=True)
                raise Corrupt(
                    f"shard {facts.name} of {place} is damaged or missing",
                    hint=f"run distill store verify {place} to list all damage",
                )
            partial.rename(copy / facts.name)
        write_synced(copy / MANIFEST, data)
    return copy


def _is_there(copy: Path, facts: ShardFacts) -> bool:
    file = copy / facts.name
    return file.exists() and file.stat().st_size == facts.bytes


def _cache() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "distill" / "stores"


def _no_store(place: Path | str) -> NotFound:
    return NotFound(
        f"{place} is not a store: it has no manifest.json",
        hint="give the store that distill capture wrote",
    )
