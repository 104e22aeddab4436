"""The stores of rows that `benchmarks.wire.cache` compares, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.wire.distillkit_layout import RECOMMENDED, compress, decompress
from clients.store.store import LogitStore, StoredRows
from protos.rows.codec import RowBlock, compress_rows, decode_rows, encode_rows, max_encoded_bytes
from teacher_service.cache.redis_address import RedisAddress
from teacher_service.cache.redis_tier import RedisTier

Arrays = tuple[NDArray[Any], NDArray[Any]]  # ids [n, k] and log-probs [n, k]
SHARD_BYTES = 64 << 20
BATCH = 16  # sequences asked for at once


class RowStore(Protocol):
    """A store of sequences, which are identified by numbers from 0."""

    def write(self, blocks: Sequence[RowBlock]) -> int:
        """Write all sequences and return the size of the store in bytes."""

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        """Return ids and log-probs of each sequence, as arrays that can be copied to a device."""


class ArrowStore:
    """`clients/store/store.py`: verifies every entry and every payload."""

    def __init__(self, path: Path, *, zstd: bool) -> None:
        self._path = path
        self._zstd = zstd

    def write(self, blocks: Sequence[RowBlock]) -> int:
        entries: list[StoredRows] = []
        with LogitStore(self._path, write=True) as store:
            for number, block in enumerate(blocks):
                rows = encode_rows(block)
                rows = compress_rows(rows) if self._zstd else rows
                entries.append(StoredRows(make_key(number), b"", 1, rows))
                if sum(len(entry.rows) for entry in entries) > SHARD_BYTES:
                    store.append(entries)
                    entries = []
            store.append(entries)
        self._store = LogitStore(self._path)
        return sum(self._store.sizes)

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        stored_arrays = []
        for number in numbers:
            rows = self._store.get(make_key(number))
            assert rows is not None
            stored_arrays.append(arrays_of_rows(decode_rows(rows, 1 << 30)))
        return stored_arrays


class RedisStore:
    """`teacher_service/cache/redis_tier.py` with a Redis server over TCP; verifies all rows."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop, *, zstd: bool) -> None:
        self._loop = loop
        self._zstd = zstd
        self._tier = RedisTier(RedisAddress(f"redis://{address}/0"), ttl_seconds=3600, zstd=zstd)

    def write(self, blocks: Sequence[RowBlock]) -> int:
        self._max_bytes = max_encoded_bytes(len(blocks[0]), blocks[0].k)
        rows = [encode_rows(block) for block in blocks]
        self._loop.run_until_complete(self._write(rows))
        assert self._tier.counts.errors == 0
        return sum(len(compress_rows(payload)) if self._zstd else len(payload) for payload in rows)

    async def _write(self, rows: Sequence[bytes]) -> None:
        for number, payload in enumerate(rows):
            self._tier.put(StoredRows(self._key(number), b"", 1, payload))
            if number % BATCH == BATCH - 1 or number == len(rows) - 1:
                await self._tier.wait_until_written()

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        return self._loop.run_until_complete(self._read(numbers))

    async def _read(self, numbers: Sequence[int]) -> list[Arrays]:
        lookups = (self._tier.get(self._key(number), self._max_bytes) for number in numbers)
        payloads = await asyncio.gather(*lookups)
        return [
            arrays_of_rows(decode_rows(rows, self._max_bytes))
            for rows in payloads
            if rows is not None
        ]

    def _key(self, number: int) -> bytes:
        return make_key(number + (1 << 20) * self._zstd)

    def close(self) -> None:
        self._loop.run_until_complete(self._tier.close())


class RedisBound:
    """Lower bound: MGET of raw int32 and float16 arrays with the synchronous client, unverified."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)

    def write(self, blocks: Sequence[RowBlock]) -> int:
        self._shape = blocks[0].head_logprobs.shape
        values = [to_raw_bytes(block) for block in blocks]
        for number, value in enumerate(values):
            self._client.set(f"plain:{number}", value)
        return sum(map(len, values))

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        values = self._client.mget([f"plain:{number}" for number in numbers])
        return [from_raw_bytes(value, self._shape) for value in values]

    def close(self) -> None:
        self._client.close()


class MemmapBound:
    """Lower bound: numpy.memmap of raw int32 and float16 arrays, unverified."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, blocks: Sequence[RowBlock]) -> int:
        self._shape = blocks[0].head_logprobs.shape
        self._path.write_bytes(b"".join(to_raw_bytes(block) for block in blocks))
        self._size = self._path.stat().st_size // len(blocks)
        self._map = np.memmap(self._path, np.uint8, "r")
        return self._path.stat().st_size

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        values = (self._map[self._size * n : self._size * (n + 1)].tobytes() for n in numbers)
        return [from_raw_bytes(value, self._shape) for value in values]


class SafetensorsStore:
    """One safetensors file with two tensors per sequence; it cannot grow and verifies nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, blocks: Sequence[RowBlock]) -> int:
        tensors = {}
        for number, block in enumerate(blocks):
            tensors[f"ids.{number}"], tensors[f"logprobs.{number}"] = half_precision_arrays(block)
        save_file(tensors, self._path)
        self._file = safe_open(self._path, "numpy")
        return self._path.stat().st_size

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        return [
            (self._file.get_tensor(f"ids.{n}"), self._file.get_tensor(f"logprobs.{n}"))
            for n in numbers
        ]


class ParquetStore:
    """Parquet with zstd; one row group per sequence, so that one sequence can be read alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, blocks: Sequence[RowBlock]) -> int:
        k = blocks[0].k
        schema = pa.schema({"ids": pa.list_(pa.int32(), k), "logprobs": pa.list_(pa.float16(), k)})
        with pq.ParquetWriter(self._path, schema, compression="zstd") as writer:
            for block in blocks:
                columns = [
                    pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), k)
                    for part in half_precision_arrays(block)
                ]
                writer.write_table(pa.table(columns, schema=schema))
        self._file = pq.ParquetFile(self._path)
        self._k = k
        return self._path.stat().st_size

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        stored_arrays = []
        for number in numbers:
            table = self._file.read_row_group(number)
            ids, logprobs = (
                column.combine_chunks().flatten().to_numpy().reshape(-1, self._k)
                for column in table.columns
            )
            stored_arrays.append((ids, logprobs))
        return stored_arrays


class DatasetsStore:
    """Hugging Face datasets with nested lists, as other trainers store top-k log-probs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, blocks: Sequence[RowBlock]) -> int:
        pairs = [half_precision_arrays(block) for block in blocks]
        columns = {
            "ids": [ids.tolist() for ids, _ in pairs],
            "logprobs": [logprobs.tolist() for _, logprobs in pairs],
        }
        inner = {"ids": datasets.Value("int32"), "logprobs": datasets.Value("float16")}
        self._data, size = save_data_set(self._path, columns, inner)
        return size

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        rows = (self._data[number] for number in numbers)
        return [
            (np.array(row["ids"], np.int32), np.array(row["logprobs"], np.float16)) for row in rows
        ]


class DistillKitStore:
    """DistillKit's recommended layout, read through datasets as its trainer does.

    The rows are nested lists of bytes, as in its published data sets.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, blocks: Sequence[RowBlock]) -> int:
        pairs = []
        for block in blocks:
            assert block.head_ids is not None
            pairs.append(compress(RECOMMENDED, block.head_ids, block.head_logprobs))
        columns = {
            "compressed_logprobs": [values.tolist() for values, _ in pairs],
            "bytepacked_indices": [packed.tolist() for _, packed in pairs],
        }
        inner = dict.fromkeys(columns, datasets.Value("uint8"))
        self._data, size = save_data_set(self._path, columns, inner)
        return size

    def read(self, numbers: Sequence[int]) -> list[Arrays]:
        stored_arrays = []
        for number in numbers:
            row = self._data[number]
            values, packed = (np.array(row[name], np.uint8) for name in row)
            stored_arrays.append(decompress(RECOMMENDED, values, packed))
        return stored_arrays


def save_data_set(
    path: Path, columns: dict[str, list[Any]], inner: dict[str, datasets.Value]
) -> tuple[datasets.Dataset, int]:
    """Write the table, map it again, and return it with its size in bytes."""
    lists = {name: datasets.List(datasets.List(value)) for name, value in inner.items()}
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(lists))
    data.save_to_disk(path)
    return datasets.load_from_disk(path), sum(f.stat().st_size for f in path.glob("*.arrow"))


def make_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def arrays_of_rows(block: RowBlock) -> Arrays:
    assert block.head_ids is not None
    return block.head_ids, block.head_logprobs


def half_precision_arrays(block: RowBlock) -> Arrays:
    ids, logprobs = arrays_of_rows(block)
    return np.ascontiguousarray(ids), logprobs.astype(np.float16)


def to_raw_bytes(block: RowBlock) -> bytes:
    return b"".join(part.tobytes() for part in half_precision_arrays(block))


def from_raw_bytes(value: bytes, shape: tuple[int, ...]) -> Arrays:
    count = shape[0] * shape[1]
    ids = np.frombuffer(value, np.int32, count).reshape(shape)
    return ids, np.frombuffer(value, np.float16, count, 4 * count).reshape(shape)
