"""Rows on disk: immutable Arrow shards and a manifest, written so that a kill at any point loses no
old row.

A store is a directory. Each `append` writes one shard in Arrow's IPC file format, then a manifest
that names it; both go to a temporary file, are synced and renamed. What the manifest does not name
does not exist. Arrow accepts most flipped bits, so the rows carry the codec's own checksum: decode
what `get` returns before use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from clients.logit_shards import (
    Shard,
    ShardFacts,
    StoredRows,
    cut,
    encode_shard,
    open_shard,
    write_synced,
)
from protos.errors import Corrupt, InvalidInput, WrongState

__all__ = ["LogitStore", "StoredRows"]

SCHEMA_VERSION = 1
MAX_SHARD_BYTES = 1 << 30  # Arrow's 32-bit offsets end at 2 GiB
_MANIFEST = "manifest.json"


class LogitStore:
    """Readers may share a directory with one writer; each sees the shards that were there when it
    opened.

    Raises InvalidInput without pyarrow, WrongState when another process writes here or the
    metadata is of something else, Corrupt when the manifest is unreadable.
    """

    def __init__(
        self, path: Path | str, *, write: bool = False, metadata: Mapping[str, str] | None = None
    ) -> None:
        _require_arrow()
        self.path = Path(path)
        self._lock_fd: int | None = None
        # By key: the shard's name, and the row in it.
        self._index: dict[bytes, tuple[str, int]] = {}
        self._shards: dict[str, Shard] = {}
        self.unreadable: list[str] = []
        if write:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self.path)
        try:
            self._facts, self.metadata = self._read_manifest(dict(metadata or {}))
            if write:
                self._remove_orphans()
            for facts in self._facts:
                self._open_shard(facts)
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
        """Every entry, in the order of writing."""
        for name, shard in self._shards.items():
            keys, tokens, starts = (shard.batch.column(i) for i in range(3))
            for row in range(shard.batch.num_rows):
                key: bytes = keys[row].as_py()
                if self._index.get(key) == (name, row):
                    rows = cut(shard, row)
                    yield StoredRows(key, tokens[row].as_py(), starts[row].as_py(), rows)

    def get(self, key: bytes) -> bytes | None:
        """The codec bytes of a key, not yet verified."""
        name, row = self._index.get(key, ("", 0))
        # Another thread may just be dropping the shard: who still has it may read it.
        shard = self._shards.get(name)
        return None if shard is None else cut(shard, row)

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
        name = f"{self._next_number():08d}.arrow"
        data = encode_shard(entries)
        write_synced(self.path / name, data)
        facts = ShardFacts(name, len(entries), len(data), hashlib.sha256(data).hexdigest())
        self._write_manifest([*self._facts, facts])
        self._facts.append(facts)
        self._open_shard(facts)

    def drop_oldest(self) -> None:
        """Remove the shard that was written first. A reader that has it open keeps its rows."""
        self._require_writer()
        oldest, *kept = self._facts
        # The manifest first: what it names is there, whenever the writer is killed.
        self._write_manifest(kept)
        self._facts = kept
        shard = self._shards.pop(oldest.name, None)
        for key in shard.batch.column(0).to_pylist() if shard else ():
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

    def _next_number(self) -> int:
        return int(self._facts[-1].name.split(".")[0]) + 1 if self._facts else 0

    def _read_manifest(self, metadata: dict[str, str]) -> tuple[list[ShardFacts], dict[str, str]]:
        try:
            manifest = json.loads((self.path / _MANIFEST).read_bytes())
            version = manifest["schema_version"]
            facts = [ShardFacts(**shard) for shard in manifest["shards"]]
            stored = dict(manifest["metadata"])
        except FileNotFoundError:
            return [], metadata
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(
                f"the manifest of {self.path} is unreadable", hint="delete the directory"
            ) from error
        if version != SCHEMA_VERSION:
            raise WrongState(
                f"{self.path} has schema version {version}, this program reads {SCHEMA_VERSION}",
                hint="use another directory",
            )
        if metadata and stored != metadata:
            raise WrongState(
                f"{self.path} holds the rows of something else: {stored}",
                hint="use another directory",
            )
        return facts, stored

    def _write_manifest(self, facts: Sequence[ShardFacts]) -> None:
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "metadata": self.metadata,
            "shards": [asdict(shard) for shard in facts],
        }
        write_synced(self.path / _MANIFEST, json.dumps(manifest, indent=1).encode())

    def _remove_orphans(self) -> None:
        """What a killed writer left: half-written files, and shards that no manifest names."""
        named = {facts.name for facts in self._facts}
        for file in [*self.path.glob("*.tmp"), *self.path.glob("*.arrow")]:
            if file.name not in named:
                file.unlink()

    def _open_shard(self, facts: ShardFacts) -> None:
        """A shard that is cut or malformed is left out; its name goes to `unreadable`."""
        try:
            shard = open_shard(self.path / facts.name, facts)
        except (OSError, ValueError):
            self.unreadable.append(facts.name)
            return
        self._shards[facts.name] = shard
        for row, key in enumerate(shard.batch.column(0).to_pylist()):
            # A key written again replaces one that was dropped as corrupt.
            self._index[key] = (facts.name, row)


def _require_arrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "stored rows need pyarrow, which is not installed",
            hint="pip install 'distill-service[teacher]'",
        ) from error


def _lock(path: Path) -> int:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise WrongState(
            f"another process writes to {path}", hint="wait for it, or use another directory"
        ) from error
    return lock
