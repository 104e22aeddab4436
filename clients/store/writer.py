"""Writes the store of a capture; it resumes after the last complete file."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from clients.runs.fence import require_unfenced
from clients.store.checks import damage_of
from clients.store.facts import require_same
from clients.store.manifest import (
    Manifest,
    lock_store,
    read_manifest,
    remove_unnamed,
    shard_name,
    write_manifest,
)
from clients.store.shards import (
    ShardFacts,
    StoredRows,
    encode_shard,
    require_arrow,
    write_synced,
)
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)


class StoreWriter:
    """The writer of a captured store: each `append` writes one file of the plan.

    The files and the manifest are byte-identical however often the capture is interrupted and
    resumed. A damaged file is written again, with all files after it.

    Raises WrongState if another process writes to the store, if the store has other metadata, or if
    a newer attempt of the job has started. Raises InvalidInput if pyarrow is not installed.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], counts: Sequence[int]) -> None:
        """Lock the store and verify its files; reads every byte of them.

        `counts` has the number of sequences of each file of the plan.
        """
        require_arrow()
        self.path = path
        self._lock: int | None = lock_store(path)
        try:
            require_unfenced()
            found = read_manifest(path)
            if found is not None:
                require_same(path, found.metadata, metadata)
            self._metadata = metadata if found is None else found.metadata
            self._shards = self._sound(found.shards, counts) if found else []
            if found is None or len(self._shards) < len(found.shards):
                write_manifest(path, Manifest(self._metadata, self._shards))
            remove_unnamed(path, self._shards)
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
    def files(self) -> int:
        """Number of complete files."""
        return len(self._shards)

    @property
    def bytes(self) -> int:
        """Size of the complete files in bytes."""
        return sum(shard.bytes for shard in self._shards)

    def append(self, entries: Sequence[StoredRows]) -> None:
        """Write the next file. It is durable once this returns: it survives a power failure.

        Raises OSError if the disk fails; the file is then not part of the store. Raises WrongState
        if a newer attempt of the job has started.
        """
        name = shard_name(len(self._shards))
        data, facts = encode_shard(name, entries)
        require_unfenced()
        write_synced(self.path / name, data)
        failpoint("capture-file-written")
        require_unfenced()
        write_manifest(self.path, Manifest(self._metadata, [*self._shards, facts]))
        failpoint("capture-file-named")
        self._shards.append(facts)

    def close(self) -> None:
        """Release the lock of the store. Calling it twice is safe."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _sound(self, shards: Sequence[ShardFacts], counts: Sequence[int]) -> list[ShardFacts]:
        """Return the files before the first one that is damaged or not of this plan.

        Reads every byte.
        """
        first = 0
        for number, (shard, count) in enumerate(zip(shards, counts, strict=False)):
            damage = damage_of(self.path, shard, first)
            if (shard.name, shard.count) != (shard_name(number), count):
                damage = f"it is not file {number} of this capture"
            if damage is not None:
                log.warning(
                    "%s: %s; it is written again, with all files after it", shard.name, damage
                )
                return list(shards[:number])
            first += count
        return list(shards[: len(counts)])
