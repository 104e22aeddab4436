"""Shards of a store.

A shard is an immutable Arrow file, written atomically and read by memory map.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from clients.runs.file_system import fsync_directory
from protos.errors import Corrupt, InvalidInput
from protos.extras import install_command
from protos.rows.codec import HEADER_BYTES
from protos.rpc.failpoints import failpoint

KEY_BYTES = 32
_CHECK_BYTES = 16


@dataclass(frozen=True)
class StoredRows:
    """One sequence of a store.

    - `key`: KEY_BYTES bytes
    - `token_ids`: little-endian int32, the whole sequence
    - `start`: first scored position
    - `rows`: the rows, encoded by `protos.rows.codec`
    - `images`: names and digests of the prompt's images, encoded by `stored_images`
    """

    key: bytes
    token_ids: bytes
    start: int
    rows: bytes
    images: bytes = b""


@dataclass(frozen=True)
class ShardFacts:
    """The manifest's entry for a shard.

    - `name`: file name
    - `count`: number of sequences
    - `bytes`: size of the file
    - `sha256`: digest of the file
    - `index`: digest of all columns but the token ids and the rows
    """

    name: str
    count: int
    bytes: int
    sha256: str
    index: str


@dataclass(frozen=True)
class Shard:
    """An open shard: token ids and rows are memory-mapped, all other columns are copied to memory.

    Because the offsets are copies, a later change of the file cannot cause a read out of bounds.
    """

    name: str
    keys: Sequence[bytes]
    token_offsets: NDArray[np.int32]
    token_ids: memoryview
    starts: NDArray[np.int32]
    checks: bytes
    row_offsets: NDArray[np.int32]
    rows: memoryview
    images: Sequence[bytes] = ()

    def entry(self, row: int) -> StoredRows:
        """Return sequence `row` of the shard. Raises Corrupt if its checksum does not match.

        The checksum covers only the header of the encoded rows. `decode_rows` verifies the rest.
        """
        entry = StoredRows(
            self.keys[row],
            bytes(self.token_ids[self.token_offsets[row] : self.token_offsets[row + 1]]),
            int(self.starts[row]),
            bytes(self.rows[self.row_offsets[row] : self.row_offsets[row + 1]]),
            self.images[row] if self.images else b"",
        )
        at = _CHECK_BYTES * row
        if self.checks[at : at + _CHECK_BYTES] != _entry_checksum(entry):
            raise Corrupt(f"entry {row} of shard {self.name} does not match its checksum")
        return entry


def require_arrow() -> None:
    """Raise InvalidInput if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "reading or writing a store needs pyarrow, which is not installed",
            hint=install_command("teacher"),
        ) from error


def encode_shard(name: str, entries: Sequence[StoredRows]) -> tuple[bytes, ShardFacts]:
    """Encode sequences as an Arrow IPC file of one batch.

    Returns the bytes of the file, and the entry for the manifest.
    """
    import pyarrow as pa

    columns = {
        "key": [entry.key for entry in entries],
        "token_ids": [entry.token_ids for entry in entries],
        "start": [entry.start for entry in entries],
        "check": [_entry_checksum(entry) for entry in entries],
        "rows": [entry.rows for entry in entries],
    }
    has_images = any(entry.images for entry in entries)
    if has_images:  # stores without images keep the original schema
        columns["images"] = [entry.images for entry in entries]
    batch = pa.record_batch(columns, schema=_arrow_schema(has_images))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    index = _index_digest(_shard_of_batch(name, batch))
    return data, ShardFacts(name, len(entries), len(data), hashlib.sha256(data).hexdigest(), index)


def open_shard(path: Path, facts: ShardFacts) -> Shard:
    """Open a shard by memory map.

    Raises OSError if the file cannot be read, ValueError if it differs from its entry in the
    manifest. The caller must call `require_arrow` first.
    """
    import pyarrow as pa

    if path.stat().st_size != facts.bytes:
        raise ValueError(f"the size of {path} differs from the manifest")
    try:
        # Close the descriptor, of which a process has few: the map stays valid without it.
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
        batch = pa.ipc.open_file(pa.BufferReader(mapped)).get_batch(0)
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not an Arrow file: {error}") from error
    schema = _arrow_schema("images" in batch.schema.names)
    if not batch.schema.equals(schema, check_metadata=True) or batch.num_rows != facts.count:
        raise ValueError(f"the columns or the row count of {path} differ from the manifest")
    shard = _shard_of_batch(facts.name, batch)
    if _index_digest(shard) != facts.index:
        raise ValueError(f"the index digest of {path} differs from the manifest")
    return shard


def write_synced(path: Path, data: bytes) -> None:
    """Write a file atomically: temporary file, fsync, rename, fsync of the directory.

    After a crash or a power failure the file has either its old or its new content. Raises OSError
    if the disk fails or is full.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            failpoint("file-written")
            os.fsync(stream.fileno())
        failpoint("file-synced")
        temporary.replace(path)
        failpoint("file-renamed")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def _arrow_schema(images: bool = False) -> Any:
    import pyarrow as pa

    return pa.schema(
        {
            "key": pa.binary(KEY_BYTES),
            "token_ids": pa.binary(),
            "start": pa.int32(),
            "check": pa.binary(_CHECK_BYTES),
            "rows": pa.binary(),
            **({"images": pa.binary()} if images else {}),
        }
    )


def _shard_of_batch(name: str, batch: Any) -> Shard:
    key, token_ids, start, check, rows, *images = batch.columns
    count = batch.num_rows
    return Shard(
        name=name,
        keys=key.to_pylist(),
        token_offsets=_copy_integers(token_ids, count + 1),
        token_ids=memoryview(token_ids.buffers()[2]),
        starts=_copy_integers(start, count),
        checks=check.buffers()[1].to_pybytes(),
        row_offsets=_copy_integers(rows, count + 1),
        rows=memoryview(rows.buffers()[2]),
        images=images[0].to_pylist() if images else (),
    )


def _copy_integers(column: Any, count: int) -> NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, count).copy()


def _index_digest(shard: Shard) -> str:
    hasher = xxhash.xxh3_128(b"".join(shard.keys))
    for column in (shard.token_offsets, shard.starts, shard.row_offsets):
        hasher.update(column.tobytes())
    hasher.update(shard.checks[: _CHECK_BYTES * len(shard.keys)])
    return hasher.hexdigest()


def _entry_checksum(entry: StoredRows) -> bytes:
    """Compute the checksum of a sequence in a shard.

    It covers all columns, but only the header of the encoded rows. The header contains a digest of
    the rest of the rows.
    """
    hasher = xxhash.xxh3_128(entry.key)
    hasher.update(struct.pack("<iQ", entry.start, len(entry.rows)))
    hasher.update(entry.token_ids)
    hasher.update(entry.rows[:HEADER_BYTES])
    hasher.update(entry.images)
    return hasher.digest()
