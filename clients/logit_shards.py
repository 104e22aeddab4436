"""One shard of stored rows: an immutable Arrow file, written whole and read through a map of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32


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
class Shard:
    """An open shard. The offsets are a copy, checked once: a bit that flips on disk later cannot
    send a read out of the file.
    """

    offsets: NDArray[np.int32]
    data: memoryview
    batch: Any


def encode_shard(entries: Sequence[StoredRows]) -> bytes:
    """Arrow's IPC file format, one batch."""
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


def open_shard(path: Path, facts: ShardFacts) -> Shard:
    """Map a shard. Raises OSError, or ValueError when it is not what its manifest says."""
    import pyarrow as pa

    if path.stat().st_size != facts.bytes:
        raise ValueError(f"{path} has another size than its manifest says")
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate(full=True)
    if batch.num_rows != facts.count or batch.schema.names != ["key", "token_ids", "start", "rows"]:
        raise ValueError(f"{path} is not what its manifest says")
    _, offsets, data = batch.column(3).buffers()
    copied = np.frombuffer(offsets, np.int32, facts.count + 1).copy()
    return Shard(copied, memoryview(data), batch)


def cut(shard: Shard, row: int) -> bytes:
    """The codec bytes of one row."""
    return bytes(shard.data[shard.offsets[row] : shard.offsets[row + 1]])


def write_synced(path: Path, data: bytes) -> None:
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
