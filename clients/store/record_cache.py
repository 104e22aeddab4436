"""The records of a data set in one memory-mapped file.

The file is created once per machine for each version of the data.

    $XDG_CACHE_HOME/distill/records/KEY/   records.arrow   JSON text, file and row of each record
                                           facts.json      number of records; written last
                                           checks-*.json   results of checks, by their settings
                                           states-*.u8     which records are left out; see `States`
                                           order-*         the order of an epoch, of the trainer

KEY is a sha256 of three things: the fingerprint of the content, the columns, and the version of
this format. The first process that needs a missing file creates it; other processes wait for the
lock. Every record has a checksum, so a process detects a damaged file. If the cache directory
cannot be written or locked, each process holds the records in memory, which takes about the size of
the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.records import DataSet
from clients.store.cache_entries import LOCK, delete_all, delete_unused, locked_entry
from clients.store.copies import cache_directory, create_cache
from protos.errors import Corrupt, InvalidInput
from protos.operating_system import reserve_space, write_at

_VERSION = 1  # of the files, and of the checks
_FILE, _FACTS = "records.arrow", "facts.json"
# The columns of the file, and their types.
_COLUMNS = {"file": "int32", "row": "int64", "text": "large_binary", "checksum": "uint32"}
BYTES_PER_RECORD = 24  # file, row, place of the text, checksum
_BATCH = 4096
_SECONDS_BETWEEN_REPORTS = 10.0
# A file that changed less than this before the hash may change again in the same clock tick.
_CLOCK_SECONDS = 2.0
# Bytes are stored as an object with this key. The second value is the key as JSON writes it.
_BYTES, _ESCAPED_BYTES = "\0bytes", rb"\u0000bytes"

log = logging.getLogger(__name__)


def records_directory() -> Path:
    """Return the parent directory of all cached records."""
    return cache_directory() / "records"


class CachedRecords:
    """The records of a data set: from a memory-mapped file, or in memory if there is no cache.

    `directory`: the directory for results of checks; None without a cache.
    """

    def __init__(
        self,
        data_set: DataSet,
        directory: Path | None,
        columns: Mapping[str, Any] | Sequence[tuple[int, int, Any]],
        *,
        has_bytes: bool = False,
    ) -> None:
        """Create the sequence of records.

        - `columns`: the Arrow columns `text`, `file`, `row` and `checksum`; without a cache, the
          list of (file, row, record)
        - `has_bytes`: True if some values are bytes, which the JSON texts represent as objects with
          one key
        """
        self._data_set = data_set
        self._columns = columns
        self._hook = _restore_bytes if has_bytes else None
        self.directory = directory

    def __len__(self) -> int:
        return len(self._columns["row"] if isinstance(self._columns, Mapping) else self._columns)

    def __getitem__(self, index: int) -> tuple[str, Mapping[str, Any]]:
        """Return a record, and its file and row as a text for messages: (text, record).

        Raises Corrupt if the checksum of the record does not match.
        """
        if not isinstance(self._columns, Mapping):
            file, row, record = self._columns[index]
            return self._data_set.place(file, row), record
        values = (
            self._columns[name][index].as_py() for name in ("file", "row", "text", "checksum")
        )
        return self._parse(*values)

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if not isinstance(self._columns, Mapping):
            yield from (self[index] for index in range(len(self)))
            return
        for first in range(0, len(self), _BATCH):
            parts = (self._columns[name].slice(first, _BATCH).to_pylist() for name in _COLUMNS)
            for values in zip(*parts, strict=True):
                yield self._parse(*values)

    def _parse(
        self, file: int, row: int, text: bytes, checksum: int
    ) -> tuple[str, Mapping[str, Any]]:
        if _checksum(file, row, text) != checksum:
            assert self.directory is not None, "records in memory cannot be damaged"
            with suppress(OSError):
                (self.directory / _FACTS).unlink(missing_ok=True)
            raise Corrupt(
                f"the cached records in {self.directory} are damaged",
                hint="start the job again, which creates the records again",
            )
        return self._data_set.place(file, row), json.loads(text, object_hook=self._hook)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory during the block, so that one process at a time checks the
        records.

        If the directory cannot be locked, several processes may check the records at the same time.
        All of them get the same result.
        """
        with ExitStack() as stack:
            if self.directory:
                try:
                    stack.enter_context(locked_entry(self.directory))
                except (OSError, InvalidInput) as error:
                    log.warning("the records of %s are checked: %s", self._data_set.path, error)
            yield


def open_records(data_set: DataSet, columns: Sequence[str]) -> CachedRecords:
    """Return the records of a data set, with the given columns.

    The records come from the cache. If the cache does not have them yet, they are read and added
    first. Raises the InvalidInput errors of `DataSet.rows`, and InvalidInput if the data change
    while they are read.
    """
    try:
        root = create_cache() / records_directory().name
        root.mkdir(exist_ok=True)
        directory = root / _content_key(data_set, columns, root)
        with locked_entry(directory):
            return _open(data_set, directory) or _make(data_set, columns, directory, root)
    except _NoJSON as error:  # a value that JSON does not have, such as a date
        log.info("the records of %s are held in memory: %s", data_set.path, error)
        return CachedRecords(data_set, None, list(data_set.located(columns)))
    except (OSError, InvalidInput) as error:
        if isinstance(error, InvalidInput) and error.field:
            raise
        log.warning(
            "each process holds the records of %s in memory: %s. Set XDG_CACHE_HOME to a directory"
            " that can be written, or free space (distill cache --clear)",
            *(data_set.path, error),
        )
    return _read_into_memory(data_set, columns)


def _read_into_memory(data_set: DataSet, columns: Sequence[str]) -> CachedRecords:
    import pyarrow

    batches, has_bytes = list[Any](), False
    try:
        for batch, batch_has_bytes in _read_batches(data_set, columns):
            batches.append(batch)
            has_bytes |= batch_has_bytes
    except _NoJSON:
        return CachedRecords(data_set, None, list(data_set.located(columns)))
    table = pyarrow.Table.from_batches(batches, _schema())
    arrow_columns = {name: table.column(name) for name in _COLUMNS}
    return CachedRecords(data_set, None, arrow_columns, has_bytes=has_bytes)


def _open(data_set: DataSet, directory: Path) -> CachedRecords | None:
    """Return the cached records in a directory; None if their file is missing or damaged."""
    import pyarrow

    try:
        facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        file = directory / _FILE
        if file.stat().st_size != facts["bytes"]:
            raise ValueError("has another size")
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        table.validate(full=True)  # offsets beyond the file would end the process
        if table.num_rows != facts["records"] or table.schema != _schema():
            raise ValueError("has another number or form of records")
        columns = {name: table.column(name) for name in _COLUMNS}
        has_bytes = bool(facts["has_bytes"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        log.warning("%s is damaged and made again: %s", directory, error)
        return None
    return CachedRecords(data_set, directory, columns, has_bytes=has_bytes)


def _make(data_set: DataSet, columns: Sequence[str], directory: Path, root: Path) -> CachedRecords:
    """Read the records of a data set, write their file, and open it. The caller holds the lock."""
    import pyarrow

    delete_unused(root)
    for leftover in directory.iterdir():
        if leftover.name != LOCK:
            leftover.unlink()
    partial = directory / f"{_FILE}.tmp"
    count, has_bytes = 0, False
    try:
        with (
            pyarrow.OSFile(str(partial), "wb") as sink,
            pyarrow.ipc.new_file(sink, _schema()) as file,
        ):
            for batch, batch_has_bytes in _read_batches(data_set, columns):
                file.write_batch(batch)
                count += batch.num_rows
                has_bytes |= batch_has_bytes
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        if _content_key(data_set, columns, root) != directory.name:
            raise InvalidInput(
                f"{data_set.path} has changed while it was read",
                field=data_set.field,
                hint="start the job again when the file is complete",
            )
        size = partial.stat().st_size
        partial.replace(directory / _FILE)
        facts = {"records": count, "bytes": size, "has_bytes": has_bytes}
        _replace(directory / _FACTS, json.dumps(facts))
    finally:
        partial.unlink(missing_ok=True)
    log.info(
        "%s: %s records, cached in %s (%.0f MiB)",
        *(data_set.path, f"{count:,}", directory, size / 2**20),
    )
    cached = _open(data_set, directory)
    if cached is None:
        raise FileNotFoundError(f"{directory} was deleted")
    return cached


def _read_batches(data_set: DataSet, columns: Sequence[str]) -> Iterator[tuple[Any, bool]]:
    """Yield the records in Arrow batches, as (batch, has_bytes).

    `has_bytes`: True if some values in the batch are bytes. Raises _NoJSON for a value that JSON
    cannot represent.
    """
    import pyarrow

    schema, located = _schema(), data_set.located(columns)
    reported_at, count = time.monotonic(), 0
    while batch := list(islice(located, _BATCH)):
        texts = [_format(record) for _, _, record in batch]
        files, rows = [file for file, _, _ in batch], [row for _, row, _ in batch]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        buffers: dict[str, list[Any]] = {
            "file": [np.array(files, np.int32)],
            "row": [np.array(rows, np.int64)],
            "text": [ends, b"".join(texts)],
            "checksum": [np.array([*map(_checksum, files, rows, texts)], np.uint32)],
        }
        # Not `pyarrow.array`, which imports pandas: 40 MiB and a third of a second.
        arrays = [
            pyarrow.Array.from_buffers(
                field.type, len(batch), [None, *map(pyarrow.py_buffer, buffers[field.name])]
            )
            for field in schema
        ]
        has_bytes = any(_ESCAPED_BYTES in text for text in texts)
        yield pyarrow.record_batch(arrays, schema=schema), has_bytes
        count += len(batch)
        if time.monotonic() - reported_at > _SECONDS_BETWEEN_REPORTS:
            reported_at = time.monotonic()
            log.info("reading %s: %s records so far", data_set.path, f"{count:,}")


def _replace(path: Path, text: str) -> None:
    """Write a small file atomically, without waiting for the disk.

    After a power cut the file may be missing. Its content is then computed again.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _schema() -> Any:
    import pyarrow

    return pyarrow.schema(list(_COLUMNS.items()))


class _NoJSON(Exception):
    """Raised for a record with a value that JSON cannot represent."""


def _format(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, default=_replace_bytes).encode()
    except TypeError as error:
        raise _NoJSON(str(error)) from error


def _replace_bytes(value: object) -> Mapping[str, str]:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"a value is a {type(value).__name__}")


def _restore_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if list(value) == [_BYTES] else value


def _checksum(file: int, row: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(b"%d:%d:" % (file, row)))


def _content_key(data_set: DataSet, columns: Sequence[str], root: Path) -> str:
    """Return the key of a data set in the cache.

    The hash of the files is stored, and is used again while the files do not change. A change of a
    file is detected by its ctime, even if its size and mtime were restored.
    """
    facts = [_VERSION, _fingerprint(data_set, root), *sorted(columns)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _fingerprint(data_set: DataSet, root: Path) -> str:
    paths = _paths_of(data_set)
    if not paths:  # a hub id
        return data_set.fingerprint()
    stats, memo = _stats_of(paths), _memo_of(data_set, root)
    if known := _read_memo(memo, stats):
        return known
    hashed_at = time.time()
    fingerprint = data_set.fingerprint()
    newest = max(os.stat(path).st_ctime for path in paths)
    if newest < hashed_at - _CLOCK_SECONDS:
        with suppress(OSError):
            _replace(memo, json.dumps({"stats": stats, "fingerprint": fingerprint}))
    return fingerprint


def is_hashed(data_set: DataSet) -> bool:
    """Return whether the hash of the files is stored, and the files have not changed since then."""
    paths = _paths_of(data_set)
    memo = _memo_of(data_set, records_directory())
    return bool(paths) and bool(_read_memo(memo, _stats_of(paths)))


def _paths_of(data_set: DataSet) -> list[Path]:
    """Return the files of a data set; empty for a hub id."""
    place = Path(data_set.path)
    paths = [Path(name) for name in data_set.files]
    if not paths and place.is_dir():
        paths = sorted(path for path in place.rglob("*") if path.is_file())
    return paths


def _stats_of(paths: Sequence[Path]) -> list[list[str | int]]:
    return [[str(path.absolute()), *_identity(path)] for path in paths]


def _memo_of(data_set: DataSet, root: Path) -> Path:
    """Return the path of the file that stores the hash of the data set's files."""
    name = json.dumps([str(Path(data_set.path).absolute()), data_set.name, data_set.split])
    return root / f"fingerprint-{hashlib.sha256(name.encode()).hexdigest()}.json"


def _read_memo(memo: Path, stats: Sequence[object]) -> str:
    """Return the stored hash, or "" if none is stored for the present files.

    `stats`: the present sizes and times of the files.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_text(encoding="utf-8"))
        return str(known["fingerprint"]) if known["stats"] == stats else ""
    return ""


def _identity(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_check(records: CachedRecords, key: str) -> Mapping[str, int] | None:
    """Return the stored result of a check, as numbers by name; None if no result is stored.

    `key`: identifies the check and its settings.
    """
    if records.directory is None:
        return None
    try:
        stored = json.loads((records.directory / f"checks-{key}.json").read_text(encoding="utf-8"))
        text = json.dumps(stored["result"], sort_keys=True)
        return stored["result"] if zlib.crc32(text.encode()) == stored["checksum"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_check(records: CachedRecords, key: str, result: Mapping[str, int]) -> None:
    """Store the result of a check. Does nothing if the cache cannot be written."""
    if records.directory is None:
        return
    checksum = zlib.crc32(json.dumps(dict(result), sort_keys=True).encode())
    with suppress(OSError):
        _replace(
            records.directory / f"checks-{key}.json",
            json.dumps({"result": dict(result), "checksum": checksum}),
        )


class States:
    """The state of each record of a data set: used, left out, or not known yet.

    The states are in a mapped file with one byte per record. Later attempts and other processes
    read the file. If no file can be written, the states are only in memory. Two byte values are
    codes of states. Each other value means that the state is not known, so the states in a damaged
    file are computed again.
    """

    USED, LEFT_OUT = 0xA5, 0x5A

    def __init__(self, records: CachedRecords, key: str) -> None:
        """`key`: identifies the settings that decide which records are left out.

        With the key "" the states are not stored in a file.
        """
        self.values: NDArray[np.uint8] = np.zeros(len(records), np.uint8)
        self._descriptor: int | None = None
        if records.directory is None or not key or not len(records):
            return
        with suppress(OSError):
            path = records.directory / f"states-{key}.u8"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                reserve_space(descriptor, len(records))
                self.values = np.memmap(path, np.uint8, "r", shape=len(records))
                self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def is_known(self, index: int) -> bool:
        """Return whether the state of a record is known."""
        return self.values[index] in (self.USED, self.LEFT_OUT)

    def set(self, index: int, *, used: bool) -> None:
        """Store the state of a record: used, or left out."""
        value = self.USED if used else self.LEFT_OUT
        if self.values[index] == value:
            return
        if self._descriptor is not None:
            try:
                write_at(self._descriptor, bytes([value]), index)
                return
            except OSError:  # a full disk: this process keeps the states in memory
                self.values, self._descriptor = np.array(self.values), None
        self.values[index] = value


def cached_sizes() -> dict[str, int]:
    """Return the size in bytes of each part of the cache: `records`, `files` and `stores`.

    Raises InvalidInput if a directory cannot be read.
    """
    try:
        places = sorted(cache_directory().iterdir())
        return {place.name: _size(place) for place in places if place.is_dir()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidInput(
            f"cannot read {error.filename}: {error.strerror}",
            hint="change the permissions of the directory",
        ) from error


def _size(place: Path) -> int:
    """Return the size in bytes of all files below a directory.

    Files that are deleted at the same time are not counted.
    """
    size = 0
    for folder, _, names in os.walk(place, onerror=_raise_unless_missing):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(folder, name).stat().st_size
    return size


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def clear_records() -> int:
    """Delete the cached records, except those of data sets that a process reads or checks now.

    Running jobs keep the files that they have open. Returns the number of data sets that are kept.
    """
    return delete_all(records_directory())
