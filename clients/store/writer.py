"""The writer of a capture's store, on a disk or in object storage.

It can resume after an interruption.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from clients.data.object_urls import is_object_url
from clients.runs.fence import require_unfenced
from clients.store.checks import damage_of
from clients.store.manifest import (
    MANIFEST,
    Manifest,
    lock_store,
    manifest_bytes,
    read_manifest,
    remove_unnamed,
    require_same,
    shard_name,
)
from clients.store.objects import ObjectFolder
from clients.store.shards import ShardFacts, StoredRows, encode_shard, require_arrow, write_synced
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)


class StoreFolder(Protocol):
    """The files of one store, as its only writer uses them. `name`: display name of the store."""

    name: str

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no store."""
        ...

    def claim(self) -> None:
        """Make this process the only writer. The caller does this before it changes a file."""
        ...

    def damages(self, shards: Sequence[ShardFacts]) -> Iterator[str | None]:
        """Yield one element per shard: a text about its problem, or None if it is whole."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically. When this method returns, the file survives a power failure.

        Raises OSError if the disk fails.
        """
        ...

    def remove_unnamed(self, shards: Sequence[ShardFacts]) -> None:
        """Delete the shards that are not in `shards`, which an interrupted writer left."""
        ...

    def close(self) -> None:
        """Allow other writers. A second call does nothing."""
        ...


def open_folder(place: str, stopped: Callable[[], bool]) -> StoreFolder:
    """Open a store for writing, at a path or at a URL.

    A path is locked until `close`. Raises WrongState if another process has locked it. Object
    storage has no locks: the last process that called `claim` is the writer. In all other
    processes, the methods that change files then raise WrongState.

    `stopped`: returns True to end a wait for object storage.
    """
    if is_object_url(place):
        return ObjectFolder(place, stopped=stopped)
    return DiskFolder(Path(place))


class DiskFolder:
    """A store in a directory.

    The directory is created if it is missing, and locked until `close`.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._lock: int | None = lock_store(path)

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no store. Raises the errors of `read_manifest`."""
        return read_manifest(self._path)

    def claim(self) -> None:
        """Do nothing: the lock of the directory already excludes other writers."""

    def damages(self, shards: Sequence[ShardFacts]) -> Iterator[str | None]:
        """Read every byte of the shards. Yield a text about the problem of each shard, or None."""
        first_index = 0
        for shard in shards:
            yield damage_of(self._path, shard, first_index)
            first_index += shard.count

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically. When this method returns, the file survives a power failure.

        Raises OSError if the disk fails.
        """
        write_synced(self._path / name, data)

    def remove_unnamed(self, shards: Sequence[ShardFacts]) -> None:
        """Delete the files that an interrupted writer left.

        These are temporary files, and shard files that are not in `shards`.
        """
        remove_unnamed(self._path, shards)

    def close(self) -> None:
        """Release the lock of the store. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StoreWriter:
    """The writer of a captured store. Each call of `append` writes the next file of the capture.

    The plan of a capture fixes the sequences of each file. After interruptions, the store is
    therefore byte-identical to the store of an uninterrupted capture. A damaged file and all files
    after it are written again.

    Raises WrongState if another process writes to the store, if the store has other metadata, or if
    a newer attempt of the job has started. Raises InvalidInput if pyarrow is not installed.
    """

    def __init__(
        self,
        place: Path | str,
        metadata: Mapping[str, str],
        counts: Sequence[int],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the store for writing, and verify its files: on a disk, every byte.

        - `place`: a path, or a URL of object storage
        - `metadata`: the metadata for the manifest; see `clients/store/manifest.py`
        - `counts`: the number of sequences in each file of the plan
        - `stopped`: returns True to end a wait for object storage
        """
        require_arrow()
        self._folder = open_folder(str(place), stopped)
        try:
            require_unfenced()
            manifest = self._folder.manifest()
            if manifest is not None:
                require_same(place, manifest.metadata, metadata)
            self._folder.claim()
            manifest = self._folder.manifest()  # an earlier writer may have named more
            self._metadata = metadata if manifest is None else manifest.metadata
            self._shards = self._keep_undamaged(manifest.shards, counts) if manifest else []
            if manifest is None or len(self._shards) < len(manifest.shards):
                self._write_manifest(self._shards)
            self._folder.remove_unnamed(self._shards)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def place(self) -> str:
        """The path or URL of the store."""
        return self._folder.name

    @property
    def files(self) -> int:
        """Number of complete files."""
        return len(self._shards)

    @property
    def bytes(self) -> int:
        """Size of the complete files in bytes."""
        return sum(shard.bytes for shard in self._shards)

    def append(self, entries: Sequence[StoredRows]) -> None:
        """Write the next file. When this method returns, the file survives a power failure.

        Raises OSError if the disk fails, and Unavailable if the object storage does not answer. In
        both cases, the file is not part of the store. Raises WrongState if a newer attempt of the
        job has started.
        """
        name = shard_name(len(self._shards))
        data, facts = encode_shard(name, entries)
        require_unfenced()
        self._folder.write(name, data)
        failpoint("capture-file-written")
        require_unfenced()
        self._write_manifest([*self._shards, facts])
        failpoint("capture-file-named")
        self._shards.append(facts)

    def close(self) -> None:
        """Release the lock of the store. A second call does nothing."""
        self._folder.close()

    def _write_manifest(self, shards: Sequence[ShardFacts]) -> None:
        """Write a manifest that names these shards."""
        self._folder.write(MANIFEST, manifest_bytes(Manifest(self._metadata, shards)))

    def _keep_undamaged(
        self, shards: Sequence[ShardFacts], counts: Sequence[int]
    ) -> list[ShardFacts]:
        """Return the shards that can be kept: those before the first damaged or unexpected shard.

        A shard is unexpected if the plan (`counts`) has another file at its place.
        """
        shards = shards[: len(counts)]
        for number, damage in enumerate(self._folder.damages(shards)):
            shard = shards[number]
            if (shard.name, shard.count) != (shard_name(number), counts[number]):
                damage = f"the file is not file {number} of this capture"
            if damage is not None:
                log.warning(
                    "%s: %s; the capture writes this file and all later files again",
                    shard.name,
                    damage,
                )
                return list(shards[:number])
        return list(shards)
