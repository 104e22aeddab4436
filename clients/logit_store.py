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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import Corrupt, InvalidInput, WrongState

SCHEMA_VERSION = 1
MAX_SHARD_BYTES = 1 << 30  # Arrow's 32-bit offsets end at 2 GiB
KEY_BYTES = 32
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoredRows:
    """One sequence: its key, token ids (int32 little-endian), first scored position, and codec
    bytes.
    """

    key: bytes
    token_ids: bytes
    start: int
    rows: bytes


@dataclass(frozen=True)
class ShardFacts:
    """A line of the manifest."""

    name: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Shard:
    """An open shard. The offsets are a copy, checked once: a bit that flips on disk later cannot
    send a read out of the file.
    """

    offsets: NDArray[np.int32]
    data: memoryview
    batch: Any


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
        self._index: dict[bytes, tuple[int, int]] = {}
        self._shards: list[_Shard] = []
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

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[StoredRows]:
        """Every entry, in the order of writing."""
        for shard_number, shard in enumerate(self._shards):
            keys, tokens, starts = (shard.batch.column(i) for i in range(3))
            for row in range(shard.batch.num_rows):
                key: bytes = keys[row].as_py()
                if self._index.get(key) == (shard_number, row):
                    rows = _cut(shard, row)
                    yield StoredRows(key, tokens[row].as_py(), starts[row].as_py(), rows)

    def get(self, key: bytes) -> bytes | None:
        """The codec bytes of a key, not yet verified."""
        found = self._index.get(key)
        return None if found is None else _cut(self._shards[found[0]], found[1])

    def drop(self, key: bytes) -> None:
        """Forget an entry that turned out to be corrupt; a later append of the key wins."""
        self._index.pop(key, None)

    def append(self, entries: Sequence[StoredRows]) -> None:
        """Write one shard. Once it returns, they survive a power cut. Raises OSError of the
        disk.
        """
        if self._lock_fd is None:
            raise WrongState("this store was opened for reading", hint="open it with write=True")
        if sum(len(entry.rows) + len(entry.token_ids) for entry in entries) > MAX_SHARD_BYTES:
            raise InvalidInput("a shard holds at most 1 GiB", hint="append in several steps")
        if not entries:
            return
        name = f"{len(self._facts):08d}.arrow"
        data = _encode_shard(entries)
        _write_synced(self.path / name, data)
        facts = ShardFacts(name, len(entries), len(data), hashlib.sha256(data).hexdigest())
        self._write_manifest([*self._facts, facts])
        self._facts.append(facts)
        self._open_shard(facts)

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
        _write_synced(self.path / _MANIFEST, json.dumps(manifest, indent=1).encode())

    def _remove_orphans(self) -> None:
        """What a killed writer left: half-written files, and shards that no manifest names."""
        named = {facts.name for facts in self._facts}
        for file in [*self.path.glob("*.tmp"), *self.path.glob("*.arrow")]:
            if file.name not in named:
                file.unlink()

    def _open_shard(self, facts: ShardFacts) -> None:
        """A shard that is cut or malformed is left out; its name goes to `unreadable`."""
        try:
            shard = _open_shard(self.path / facts.name, facts)
        except (OSError, ValueError):
            self.unreadable.append(facts.name)
            return
        self._shards.append(shard)
        number = len(self._shards) - 1
        for row, key in enumerate(shard.batch.column(0).to_pylist()):
            # A key written again replaces one that was dropped as corrupt.
            self._index[key] = (number, row)


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


def _encode_shard(entries: Sequence[StoredRows]) -> bytes:
    import pyarrow as pa

    columns = {
        "key": pa.array([entry.key for entry in entries], pa.binary(KEY_BYTES)),
        "token_ids": pa.array([entry.token_ids for entry in entries], pa.binary()),
        "start": pa.array([entry.start for entry in entries], pa.int32()),
        "rows": pa.array([entry.rows for entry in entries], pa.binary()),
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _open_shard(path: Path, facts: ShardFacts) -> _Shard:
    import pyarrow as pa

    if path.stat().st_size != facts.bytes:
        raise ValueError(f"{path} has another size than its manifest says")
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate(full=True)
    if batch.num_rows != facts.count or batch.schema.names != ["key", "token_ids", "start", "rows"]:
        raise ValueError(f"{path} is not what its manifest says")
    _, offsets, data = batch.column(3).buffers()
    copied = np.frombuffer(offsets, np.int32, facts.count + 1).copy()
    return _Shard(copied, memoryview(data), batch)


def _cut(shard: _Shard, row: int) -> bytes:
    return bytes(shard.data[shard.offsets[row] : shard.offsets[row + 1]])


def _write_synced(path: Path, data: bytes) -> None:
    """All of the file or nothing, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
