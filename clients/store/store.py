"""A key-value store of rows on disk: immutable Arrow shards and a manifest.

A store is a directory. Each `append` writes a shard in Arrow's IPC file format, and then a manifest
that lists the shard. A file is first written under a temporary name, then synced and renamed. Only
shards in the manifest are part of the store, so earlier rows are safe if the process is killed.

Arrow does not detect most bit errors, so every entry has a checksum. The encoded rows have another
checksum, which `decode_rows` verifies. Decode the bytes that `get` returns before you use them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from clients.store.manifest import (
    MANIFEST,
    Manifest,
    lock_store,
    number_of,
    read_manifest,
    remove_unnamed,
    shard_name,
    write_manifest,
)
from clients.store.shards import (
    Shard,
    ShardFacts,
    StoredRows,
    encode_shard,
    open_shard,
    require_arrow,
    write_synced,
)
from protos.errors import Corrupt, InvalidInput, WrongState
from protos.rpc.failpoints import failpoint

__all__ = ["LogitStore", "StoredRows", "remove_store"]

MAX_SHARD_BYTES = 1 << 30  # below the 2 GiB limit of Arrow's 32-bit offsets
_DAMAGED_SUFFIX = ".damaged"


class LogitStore:
    """A store that is open for reading, or for reading and writing.

    One writer and many readers may use a store at the same time. A reader sees the shards that
    existed when it opened the store. A damaged shard is skipped, and its name is added to
    `unreadable`. A writer also renames the file of a damaged shard to `NAME.damaged`.

    Raises InvalidInput if pyarrow is not installed, WrongState if another process is writing to the
    store or its metadata differs from `metadata`, Corrupt if the manifest cannot be parsed.
    """

    def __init__(
        self, path: Path | str, *, write: bool = False, metadata: Mapping[str, str] | None = None
    ) -> None:
        require_arrow()
        self.path = Path(path)
        self._lock_fd: int | None = None
        # key -> (shard name, index of the entry in the shard)
        self._index: dict[bytes, tuple[str, int]] = {}
        self._has_orphans = False
        self._shards: dict[str, Shard] = {}
        self.unreadable: list[str] = []
        if write:
            self._lock_fd = lock_store(self.path)
        try:
            manifest = self._open_all(dict(metadata or {}))
            self.metadata, self._facts = dict(manifest.metadata), list(manifest.shards)
            self._next_number = 1 + max(map(number_of, self._facts), default=-1)
            if write:
                self._set_aside()
                self._remove_orphans()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LogitStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def sizes(self) -> Sequence[int]:
        """Size of each shard in bytes, oldest first."""
        return [facts.bytes for facts in self._facts]

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[StoredRows]:
        """Yield every entry in the order written. Raises Corrupt at a damaged entry."""
        for name, shard in self._shards.items():
            for row, key in enumerate(shard.keys):
                if self._index.get(key) == (name, row):
                    yield shard.entry(row)

    def get(self, key: bytes) -> bytes | None:
        """Return the encoded rows of `key`, or None if it is not stored.

        Raises Corrupt if the entry's checksum does not match. Decode the bytes with `decode_rows`,
        which checks their content.
        """
        name, row = self._index.get(key, ("", 0))
        # Another thread may be dropping the shard; a reference taken before that stays readable.
        shard = self._shards.get(name)
        return None if shard is None else shard.entry(row).rows

    def drop(self, key: bytes) -> None:
        """Remove a damaged entry from the index in memory, so that its key can be appended again.

        The entry stays in the file. When the store is opened again, the newest entry of a key is
        used.
        """
        self._index.pop(key, None)

    def append(self, entries: Sequence[StoredRows]) -> None:
        """Write `entries` as one shard. When this method returns, they survive a power failure.

        Raises WrongState if the store was opened for reading, InvalidInput for more than
        MAX_SHARD_BYTES of rows and token ids, OSError if the disk fails or is full.
        """
        self._require_writer()
        if sum(len(entry.rows) + len(entry.token_ids) for entry in entries) > MAX_SHARD_BYTES:
            raise InvalidInput("a shard holds at most 1 GiB", hint="append fewer rows at a time")
        if not entries:
            return
        name = shard_name(self._next_number)
        data, facts = encode_shard(name, entries)
        # Never reuse a number: after a disk error the manifest may already name this file.
        self._next_number += 1
        try:
            write_synced(self.path / name, data)
            failpoint("shard-written")
            self._write_manifest([*self._facts, facts])
            failpoint("shard-named")
        except OSError:
            self._has_orphans = True
            raise
        self._facts.append(facts)
        if self._has_orphans:
            self._remove_orphans()
        self._index_shard(self._open_shard(facts))

    def drop_oldest(self) -> None:
        """Delete the oldest shard. A reader that has the shard open can still read its rows.

        Raises WrongState if the store was opened for reading, OSError if the disk fails.
        """
        self._require_writer()
        oldest, *remaining = self._facts
        # Manifest first: if the writer is killed here, every shard it names still exists.
        self._write_manifest(remaining)
        failpoint("shard-unnamed")
        self._facts = remaining
        shard = self._shards.pop(oldest.name, None)
        for key in shard.keys if shard else ():
            if self._index.get(key, ("", 0))[0] == oldest.name:
                self._index.pop(key, None)
        (self.path / oldest.name).unlink(missing_ok=True)

    def verify(self) -> None:
        """Read every shard and compare its sha256.

        Raises Corrupt that names the first damaged shard.
        """
        for facts in self._facts:
            data = (self.path / facts.name).read_bytes()
            if hashlib.sha256(data).hexdigest() != facts.sha256:
                raise Corrupt(f"shard {facts.name} of {self.path} does not match its sha256")

    def close(self) -> None:
        """Release the writer lock. A second call does nothing."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _require_writer(self) -> None:
        if self._lock_fd is None:
            raise WrongState(
                "this store was opened for reading", hint="open the store with write=True"
            )

    def _read_manifest(self, metadata: dict[str, str]) -> Manifest:
        """Return the manifest. If there is no store yet, return a manifest without shards.

        `metadata`: the metadata that the caller expects; empty: any. Raises WrongState if the store
        has other metadata.
        """
        manifest = read_manifest(self.path)
        if manifest is None:
            return Manifest(metadata, [])
        if metadata and manifest.metadata != metadata:
            raise WrongState(
                f"{self.path} holds rows with other metadata: {manifest.metadata}",
                hint="use another directory",
            )
        return manifest

    def _write_manifest(self, facts: Sequence[ShardFacts]) -> None:
        write_manifest(self.path, Manifest(self.metadata, facts))

    def _remove_orphans(self) -> None:
        remove_unnamed(self.path, self._facts)
        self._has_orphans = False

    def _set_aside(self) -> None:
        """Remove damaged shards from the manifest, and rename their files for later inspection."""
        if not self.unreadable:
            return
        self._facts = [facts for facts in self._facts if facts.name not in self.unreadable]
        self._write_manifest(self._facts)
        for name in self.unreadable:
            with suppress(FileNotFoundError):
                (self.path / name).replace(self.path / (name + _DAMAGED_SUFFIX))

    def _open_all(self, metadata: dict[str, str]) -> Manifest:
        manifest = self._read_manifest(metadata)
        while True:
            opened = [self._open_shard(facts) for facts in manifest.shards]
            latest = self._read_manifest(metadata) if self.unreadable else manifest
            if latest == manifest:
                break
            # The shards are not damaged: the writer removed them after the manifest was read.
            self.unreadable.clear()
            manifest = latest
        for shard in opened:
            self._index_shard(shard)
        return manifest

    def _open_shard(self, facts: ShardFacts) -> Shard | None:
        try:
            return open_shard(self.path / facts.name, facts)
        except (OSError, ValueError):
            self.unreadable.append(facts.name)
            return None

    def _index_shard(self, shard: Shard | None) -> None:
        if shard is None:
            return
        self._shards[shard.name] = shard
        # The newest entry of a key counts: it replaces one that was dropped as corrupt.
        self._index |= {key: (shard.name, row) for row, key in enumerate(shard.keys)}


def remove_store(path: Path) -> int:
    """Delete a store, even if it is damaged. Return the number of sequences in its manifest.

    Readers that have the store open can still read its rows. Raises WrongState if another process
    is writing to the store.
    """
    lock = lock_store(path)
    try:
        try:
            shards = json.loads((path / MANIFEST).read_bytes())["shards"]
            count = sum(int(shard["count"]) for shard in shards)
        except (OSError, ValueError, KeyError, TypeError):
            count = 0
        # Manifest first: a kill must not leave a manifest that names deleted shards.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    finally:
        os.close(lock)
    return count
