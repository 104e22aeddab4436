"""The destination of the writer of a store: a directory, or a URL of an object storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from clients.data.object_urls import is_object_url
from clients.store.checks import damage_of
from clients.store.manifest import Manifest, lock_store, read_manifest, remove_unnamed
from clients.store.objects import ObjectFolder
from clients.store.shards import ShardFacts, write_synced


class StoreFolder(Protocol):
    """The files of one store, for its only writer. `name`: for messages."""

    name: str

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no store."""
        ...

    def claim(self) -> None:
        """Make this process the only writer; called before it changes anything."""
        ...

    def damages(self, shards: Sequence[ShardFacts]) -> Iterator[str | None]:
        """Yield what is wrong with each shard, or None."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically; on return it is durable. Raises OSError if the disk fails."""
        ...

    def remove_unnamed(self, shards: Sequence[ShardFacts]) -> None:
        """Delete the files of an interrupted writer: all shards that are not in `shards`."""
        ...

    def close(self) -> None:
        """Let others write. Calling it twice is safe."""
        ...


def open_folder(place: str, stopped: Callable[[], bool]) -> StoreFolder:
    """Open a store for writing: a path, which is locked, or a URL.

    Raises WrongState if another process writes to the path; a URL has no lock, and its writer
    notices another one before it writes a file. `stopped`: see ObjectFolder.
    """
    if is_object_url(place):
        return ObjectFolder(place, stopped=stopped)
    return DiskFolder(Path(place))


class DiskFolder:
    """A directory, created if needed, and locked until it is closed."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._lock: int | None = lock_store(path)

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no store. Raises as `read_manifest`."""
        return read_manifest(self._path)

    def claim(self) -> None:
        """Do nothing: the directory is locked."""

    def damages(self, shards: Sequence[ShardFacts]) -> Iterator[str | None]:
        """Yield what is wrong with each shard, or None; reads every byte."""
        first_index = 0
        for shard in shards:
            yield damage_of(self._path, shard, first_index)
            first_index += shard.count

    def write(self, name: str, data: bytes) -> None:
        """Write a file that survives a power failure. Raises OSError if the disk fails."""
        write_synced(self._path / name, data)

    def remove_unnamed(self, shards: Sequence[ShardFacts]) -> None:
        """Delete temporary files, and shard files not in `shards`."""
        remove_unnamed(self._path, shards)

    def close(self) -> None:
        """Release the lock of the store. Calling it twice is safe."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
