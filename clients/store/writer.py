"""Writes the store of a capture; it resumes after the last complete file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from clients.runs.fence import require_unfenced
from clients.store.facts import require_same
from clients.store.folders import open_folder
from clients.store.manifest import MANIFEST, Manifest, manifest_bytes, shard_name
from clients.store.shards import ShardFacts, StoredRows, encode_shard, require_arrow
from protos.rpc.failpoints import failpoint

log = logging.getLogger(__name__)


class StoreWriter:
    """The writer of a captured store: each `append` writes one file of the plan.

    The files and the manifest are byte-identical however often the capture is interrupted and
    resumed. A damaged file is written again, with all files after it.

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

        `place` is a path, or a URL of an object storage. `counts` has the number of sequences of
        each file of the plan. `stopped`: whether to wait no longer for an object storage.
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
        """Write the next file. It is durable once this returns: it survives a power failure.

        Raises OSError if the disk fails, Unavailable if the object storage does not answer; the
        file is then not part of the store. Raises WrongState if a newer attempt of the job has
        started.
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
        """Release the lock of the store. Calling it twice is safe."""
        self._folder.close()

    def _write_manifest(self, shards: Sequence[ShardFacts]) -> None:
        """Write a manifest that names these shards."""
        self._folder.write(MANIFEST, manifest_bytes(Manifest(self._metadata, shards)))

    def _keep_undamaged(
        self, shards: Sequence[ShardFacts], counts: Sequence[int]
    ) -> list[ShardFacts]:
        """Return the files before the first one that is damaged or not of this plan."""
        shards = shards[: len(counts)]
        for number, damage in enumerate(self._folder.damages(shards)):
            shard = shards[number]
            if (shard.name, shard.count) != (shard_name(number), counts[number]):
                damage = f"it is not file {number} of this capture"
            if damage is not None:
                log.warning(
                    "%s: %s; it is written again, with all files after it", shard.name, damage
                )
                return list(shards[:number])
        return list(shards)
