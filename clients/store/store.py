"""Rows on disk: immutable Arrow shards and a manifest, written so that a kill at any point loses no
old row.

A store is a directory. Each `append` writes one shard in Arrow's IPC file format, then a manifest
that names it; both go to a temporary file, are synced and renamed. What the manifest does not name
does not exist. Arrow accepts most flipped bits, so every entry carries a checksum, and its rows the
codec's own: decode what `get` returns before use.
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
    write_synced,
)
from protos.errors import Corrupt, InvalidInput, WrongState
from protos.rpc.failpoints import failpoint

__all__ = ["LogitStore", "StoredRows", "remove_store"]

MAX_SHARD_BYTES = 1 << 30  # Arrow's 32-bit offsets end at 2 GiB
_SET_ASIDE = ".damaged"


class LogitStore:
    """Readers may share a directory with one writer; each sees the shards that were there when it
    opened.

    Raises InvalidInput without pyarrow, WrongState when another process writes here or the
    metadata is of something else, Corrupt when the manifest is unreadable. A damaged shard is left
    out and named in `unreadable`; a writer also sets its file aside.
    """

    def __init__(
        self, path: Path | str, *, write: bool = False, metadata: Mapping[str, str] | None = None
    ) -> None:
        _require_arrow()
        self.path = Path(path)
        self._lock_fd: int | None = None
        # By key: the shard's name, and the row in it.
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
        """Bytes of each shard, the oldest first."""
        return [facts.bytes for facts in self._facts]

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[StoredRows]:
        """Every entry, in the order of writing. Raises Corrupt at one that is not what was
        written.
        """
        for name, shard in self._shards.items():
            for row, key in enumerate(shard.keys):
                if self._index.get(key) == (name, row):
                    yield shard.entry(row)

    def get(self, key: bytes) -> bytes | None:
        """The codec bytes of a key; they bring their own checksum. Raises Corrupt."""
        name, row = self._index.get(key, ("", 0))
        # Another thread may just be dropping the shard: who still has it may read it.
        shard = self._shards.get(name)
        return None if shard is None else shard.entry(row).rows

    def drop(self, key: bytes) -> None:
        """Forget an entry that turned out to be corrupt; a later append of the key wins."""
        self._index.pop(key, None)

    def append(self, entries: Sequence[StoredRows]) -> None:
        """Write one shard. Once it returns, they survive a power cut. Raises OSError of the
        disk.
        """
        self._require_writer()
        if sum(len(entry.rows) + len(entry.token_ids) for entry in entries) > MAX_SHARD_BYTES:
            raise InvalidInput("a shard holds at most 1 GiB", hint="append in several steps")
        if not entries:
            return
        name = shard_name(self._next_number)
        data, facts = encode_shard(name, entries)
        # Never twice: after a fault of the disk the manifest may already name this file.
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
        self._index_shard(self._open(facts))

    def drop_oldest(self) -> None:
        """Remove the shard that was written first. A reader that has it open keeps its rows."""
        self._require_writer()
        oldest, *kept = self._facts
        # The manifest first: what it names is there, whenever the writer is killed.
        self._write_manifest(kept)
        failpoint("shard-unnamed")
        self._facts = kept
        shard = self._shards.pop(oldest.name, None)
        for key in shard.keys if shard else ():
            if self._index.get(key, ("", 0))[0] == oldest.name:
                self._index.pop(key, None)
        (self.path / oldest.name).unlink(missing_ok=True)

    def verify(self) -> None:
        """Read everything: raises Corrupt, naming the shard that is not what was written."""
        for facts in self._facts:
            data = (self.path / facts.name).read_bytes()
            if hashlib.sha256(data).hexdigest() != facts.sha256:
                raise Corrupt(f"shard {facts.name} of {self.path} does not match its sha256")

    def close(self) -> None:
        """Release the writer's lock; safe to call twice."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _require_writer(self) -> None:
        if self._lock_fd is None:
            raise WrongState("this store was opened for reading", hint="open it with write=True")

    def _read_manifest(self, metadata: dict[str, str]) -> Manifest:
        """Raises WrongState when it is of other rows than `metadata` says."""
        manifest = read_manifest(self.path)
        if manifest is None:
            return Manifest(metadata, [])
        if metadata and manifest.metadata != metadata:
            raise WrongState(
                f"{self.path} holds the rows of something else: {manifest.metadata}",
                hint="use another directory",
            )
        return manifest

    def _write_manifest(self, facts: Sequence[ShardFacts]) -> None:
        write_manifest(self.path, Manifest(self.metadata, facts))

    def _remove_orphans(self) -> None:
        remove_unnamed(self.path, self._facts)
        self._has_orphans = False

    def _set_aside(self) -> None:
        """Damaged shards cost no more opens, and may still be looked at."""
        if not self.unreadable:
            return
        self._facts = [facts for facts in self._facts if facts.name not in self.unreadable]
        self._write_manifest(self._facts)
        for name in self.unreadable:
            with suppress(FileNotFoundError):
                (self.path / name).rename(self.path / (name + _SET_ASIDE))

    def _open_all(self, metadata: dict[str, str]) -> Manifest:
        manifest = self._read_manifest(metadata)
        while True:
            opened = [self._open(one) for one in manifest.shards]
            latest = self._read_manifest(metadata) if self.unreadable else manifest
            if latest == manifest:
                break
            # Not damaged: the writer removed them meanwhile.
            self.unreadable.clear()
            manifest = latest
        for shard in opened:
            self._index_shard(shard)
        return manifest

    def _open(self, facts: ShardFacts) -> Shard | None:
        try:
            return open_shard(self.path / facts.name, facts)
        except (OSError, ValueError):
            self.unreadable.append(facts.name)
            return None

    def _index_shard(self, shard: Shard | None) -> None:
        if shard is None:
            return
        self._shards[shard.name] = shard
        # A key written again replaces one that was dropped as corrupt.
        self._index |= {key: (shard.name, row) for row, key in enumerate(shard.keys)}


def remove_store(path: Path) -> int:
    """Delete a store, readable or not; returns how many sequences its manifest names. Raises
    WrongState while a writer has it; readers that have it open keep their rows.
    """
    lock = lock_store(path)
    try:
        try:
            shards = json.loads((path / MANIFEST).read_bytes())["shards"]
            count = sum(int(shard["count"]) for shard in shards)
        except (OSError, ValueError, KeyError, TypeError):
            count = 0
        # The manifest first: what it names is there, whenever we are killed.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    finally:
        os.close(lock)
    return count


def _require_arrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "stored rows need pyarrow, which is not installed",
            hint="pip install 'distill-service[teacher]'",
        ) from error
