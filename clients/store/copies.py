"""Local copies of stores and other files that a job names in object storage.

The copy of a store is in `$XDG_CACHE_HOME/distill/stores`, in a directory named by the sha256 of
the manifest. A store is therefore copied once, and copied again after a change. Copies of other
files are in `distill/files`, in directories named by the sha256 of their URL, names, sizes and
times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TypeVar

from clients.config.file import named_urls, replaced
from clients.config.kinds import AnyJob
from clients.data.models.files import MODEL_KEYS, is_model_file
from clients.data.object_urls import is_object_url, place_of
from clients.data.tokens.tokenizer import TEMPLATES
from clients.runs.file_system import create_private, lock_file
from clients.store.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from clients.store.objects import ObjectFolder
from clients.store.shards import ShardFacts, write_synced
from protos.errors import Corrupt, DistillError, InvalidInput, NotFound

log = logging.getLogger(__name__)

_Job = TypeVar("_Job", bound=AnyJob)


def manifest_at(place: Path | str) -> Manifest:
    """Return the manifest of a store at a path or URL.

    Raises NotFound if there is no store, Corrupt if the manifest is damaged, and the errors of
    ObjectFolder.
    """
    manifest = (
        ObjectFolder(str(place)).manifest() if is_object_url(place) else read_manifest(Path(place))
    )
    if manifest is None:
        raise _no_store(place)
    return manifest


def on_disk(place: Path | str) -> Path:
    """Return the directory of a store: `place` itself, or for a URL a local copy of all its files.

    Each copied file is verified. If several processes call this function at the same time, one of
    them copies and the others wait. Raises NotFound if there is no store at the URL, Corrupt if a
    file is missing or damaged, OSError if the disk is full, and the errors of ObjectFolder.
    """
    if not is_object_url(place):
        return Path(place)
    folder = ObjectFolder(str(place))
    data = folder.read(MANIFEST)
    if data is None:
        raise _no_store(place)
    manifest = parse_manifest(data, str(place))
    copy = create_cache() / "stores" / hashlib.sha256(data).hexdigest()
    copy.mkdir(parents=True, exist_ok=True)
    with (copy / "lock").open("w", encoding="utf-8") as lock:
        lock_file(lock, copy / "lock", wait=True)
        missing = [facts for facts in manifest.shards if not _is_copied(copy, facts)]
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
            partial.replace(copy / facts.name)
        write_synced(copy / MANIFEST, data)
    return copy


def files_on_disk(job: _Job) -> _Job:
    """Copy the files at URLs that the job names, and return the job with the paths of the copies.

    Stores are not copied. If several processes call this function at the same time, one of them
    copies and the others wait. Raises NotFound, naming the key, if a file does not exist, OSError
    if the disk is full, and the errors of ObjectFolder.
    """
    for key, url in named_urls(job):
        if key not in job.stores:
            job = replaced(job, key, str(_copy_files(key, url)))
    return job


def _copy_files(key: str, url: str) -> Path:
    """Copy one file, or all files of a model, from `url`. Return the local path.

    `key`: the key of the job that names the URL.
    """
    try:
        url = place_of(url)
        parent, _, name = url.rpartition("/")
        is_model = key in MODEL_KEYS
        folder = ObjectFolder(url if is_model else parent)
        facts = folder.facts("" if is_model else name)
        if is_model:
            facts |= {
                f"{TEMPLATES}/{file}": file_facts
                for file, file_facts in ObjectFolder(f"{url}/{TEMPLATES}").facts().items()
            }
    except DistillError as error:
        error.field = key
        raise
    if is_model:
        facts = {file: file_facts for file, file_facts in facts.items() if is_model_file(file)}
    if not facts:
        kind = "model" if is_model else "file"
        raise NotFound(f"there is no {kind} at {url}", field=key, hint="correct the URL")
    identity = hashlib.sha256(json.dumps([url, facts], sort_keys=True).encode()).hexdigest()
    copy = create_cache() / "files" / identity
    place = copy / name
    (place if is_model else copy).mkdir(parents=True, exist_ok=True)
    with (copy / "lock").open("w", encoding="utf-8") as lock:
        lock_file(lock, copy / "lock", wait=True)
        for file in sorted(facts):
            path = place / file if is_model else place
            if not path.exists():
                log.info("copying %s of %s to %s", file, url, copy)
                path.parent.mkdir(exist_ok=True)
                partial = path.with_name(f"{path.name}.tmp")
                folder.digest(file, partial)
                partial.replace(path)
    return place


def _is_copied(copy: Path, facts: ShardFacts) -> bool:
    file = copy / facts.name
    return file.exists() and file.stat().st_size == facts.bytes


def create_cache() -> Path:
    """Create `cache_directory` if it is missing, and return it. Only this user can enter it.

    Raises OSError if the directory cannot be created.
    """
    directory = cache_directory()
    create_private(directory)
    return directory


def cache_directory() -> Path:
    """Return the directory for copies of objects and for cached records of data sets.

    Raises InvalidInput if the user has no home directory and $XDG_CACHE_HOME is not set.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise InvalidInput(
            "this user has no home directory for the cache",
            hint="set XDG_CACHE_HOME to a directory that can be written",
        ) from error
    return caches / "distill"


def _no_store(place: Path | str) -> NotFound:
    exists = is_object_url(place) or Path(place).exists()
    reason = "manifest.json is missing" if exists else "no such directory"
    return NotFound(
        f"{place} is not a store: {reason}",
        hint="give the store that distill capture wrote",
    )
