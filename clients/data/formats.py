"""Reads files of records: JSON lines, JSON arrays, CSV and Parquet, compressed or not.

The suffix of a file determines its format. A pattern such as `data/*.jsonl` names several files.
Each record is a mapping of columns. The values of a CSV file are texts.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, cast

from clients.data.json_array import read_elements
from clients.data.outside import MAX_BYTES, open_regular, parse_json
from clients.data.parquet import (
    PARQUET_MAGIC,
    Record,
    first_line,
    has_pyarrow,
    read_parquet,
    read_parquet_start,
)
from protos.errors import InvalidInput
from protos.extras import install_command

_TEXT_SUFFIXES = (".jsonl", ".json", ".csv")
_COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
FILE_SUFFIXES = (
    *(f"{suffix}{end}" for suffix in _TEXT_SUFFIXES for end in ("", *_COMPRESSIONS)),
    ".parquet",
)
FORMATS = ".jsonl, .json, .csv (also .gz, .zst) or .parquet"

# The first records of a file, and the bytes that are read to find them.
START_RECORDS = 8
_START_BYTES = 1 << 20
_WILDCARD = re.compile(r"[*?\[]")


def suffix_of(path: str) -> str:
    """Return the suffix of a file, such as ".json" for both a.json and a.json.gz.

    Returns "" if the format of the file is not supported.
    """
    if not path.endswith(FILE_SUFFIXES):
        return ""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of file names. The path of an existing file is not a
    pattern.
    """
    return bool(_WILDCARD.search(path)) and "\0" not in path and not Path(path).exists()


def exists_here(path: str) -> bool:
    """Return whether a path exists, or is a pattern that matches a file."""
    return (
        any(Path(name).is_file() for name in glob.iglob(path, recursive=True))
        if is_pattern(path)
        else Path(path).exists()
    )


def files_of(path: str, field: str) -> list[str]:
    """Return the sorted files that a pattern matches, or the path of a single supported file.

    The result is empty for directories and hub ids. Raises InvalidInput, naming `field`, if a
    pattern matches no file, or if a file has an unsupported format.
    """
    if not is_pattern(path):
        if os.path.isfile(path) and not suffix_of(path):
            raise unknown_format_error(path, field)
        return [path] if suffix_of(path) else []
    matches = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
    if not matches:
        raise InvalidInput(
            f"no file matches {path}",
            field=field,
            hint="relative paths start at the current directory",
        )
    for name in matches:
        if not suffix_of(name):
            raise unknown_format_error(name, field)
    return matches


def unknown_format_error(path: str, field: str) -> InvalidInput:
    """Return the error for a file whose suffix is not the suffix of a supported format."""
    return InvalidInput(
        f"{path} is in no supported format: {FORMATS}",
        field=field,
        hint="convert the file to one of these formats",
    )


def read_records(path: str, columns: Sequence[str], field: str) -> Iterator[Record]:
    """Yield the records of one file in order.

    A record has each of `columns` that exists in the file, and possibly more columns. Raises
    InvalidInput, naming `field`, if the file or a record cannot be read.
    """
    if suffix_of(path) == ".parquet":
        yield from read_parquet(path, columns, field)
        return
    with _open_text(path, field) as stream:
        if suffix_of(path) == ".csv":
            yield from _read_csv(stream, path, field)[1]
        elif suffix_of(path) == ".json" and _begins_with_array(stream):
            yield from _read_array(stream, path, field)
        else:
            with _hint_of(path):
                for number, line in enumerate(_lines_of(stream, path, field), 1):
                    record = record_in(line, f"{path}:{number}", field)
                    if record is not None:
                        yield record


def read_start(path: str, field: str) -> tuple[list[str], list[Record]]:
    """Return the columns of one file, and its first records (at most START_RECORDS).

    Both lists are empty if the first record is very long, or if a package for the format is
    missing. The function reads at most 1 MiB and never blocks.

    Raises OSError if the file cannot be opened. Raises InvalidInput, naming `field`, if the file or
    one of the records cannot be read, or if the file has no records.
    """
    if suffix_of(path) == ".parquet":
        columns, records = read_parquet_start(path, field, START_RECORDS, _START_BYTES)
        if columns and not records:
            raise _no_records_error(path, field)
        return columns, records
    if path.endswith(".zst") and not has_pyarrow():
        return [], []
    with _open_text(path, field) as stream:
        columns = list[str]()
        if suffix_of(path) == ".csv":
            columns, records, is_complete = _csv_start(stream, path, field)
        elif suffix_of(path) == ".json" and _begins_with_array(stream):
            records, is_complete = _array_start(stream, path, field)
        else:
            records, is_complete = _lines_start(stream, path, field)
    if is_complete and not records:
        raise _no_records_error(path, field)
    return columns or list(
        dict.fromkeys(column for record in records for column in record)
    ), records


@contextmanager
def _open_text(path: str, field: str) -> Iterator[io.BufferedReader]:
    """Open a file for reading, and decompress it if its suffix names a compression.

    Raises InvalidInput, naming `field`, if the compressed data are damaged.
    """
    compression = _COMPRESSIONS.get(Path(path).suffix)
    with open_regular(Path(path)) as file:
        if compression is None:
            yield io.BufferedReader(cast(io.RawIOBase, file))
            return
        try:
            yield _decompress(file, path, compression, field)
        except (EOFError, zlib.error, OSError) as error:
            raise InvalidInput(
                f"{path} cannot be read as {compression}: {first_line(error)}",
                field=field,
                hint="compress the file again",
            ) from error


def _decompress(file: BinaryIO, path: str, compression: str, field: str) -> io.BufferedReader:
    if compression == "gzip":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)))
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidInput(
            f"{path} needs the package `pyarrow`, which is not installed",
            field=field,
            hint=install_command("train"),
        ) from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"))


def _lines_of(stream: BinaryIO, path: str, field: str) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raises InvalidInput for a line of more than MAX_BYTES, because a small compressed file can
    contain a line of gigabytes.
    """
    number = 0
    while line := stream.readline(MAX_BYTES + 1):
        number += 1
        if len(line) > MAX_BYTES:
            raise InvalidInput(
                f"{path}:{number} is longer than {MAX_BYTES >> 20} MiB",
                field=field,
                hint="write one record in each line",
            )
        yield line


def _begins_with_array(stream: io.BufferedReader) -> bool:
    """Return whether the text in a stream begins as a JSON array. Does not advance the stream."""
    return stream.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_array(stream: BinaryIO, path: str, field: str) -> Iterator[Record]:
    try:
        for number, value in enumerate(read_elements(stream), 1):
            yield _require_object(value, number, path, field)
    except InvalidInput:
        raise
    except ValueError as error:
        raise _not_array_error(path, str(error), field) from error


def _array_start(stream: BinaryIO, path: str, field: str) -> tuple[list[Record], bool]:
    """Return the first records of a JSON array, and whether the whole file was read."""
    content = stream.read(_START_BYTES)
    is_complete = len(content) < _START_BYTES
    records = list[Record]()
    try:
        for number, value in enumerate(read_elements(io.BytesIO(content)), 1):
            records.append(_require_object(value, number, path, field))
            if number == START_RECORDS and not is_complete:
                break
    except InvalidInput:
        raise
    except ValueError as error:  # cut here, or damaged, which reading all of it finds
        if is_complete:
            raise _not_array_error(path, str(error), field) from error
    return records[:START_RECORDS], is_complete


def _require_object(value: Any, number: int, path: str, field: str) -> Record:
    if not isinstance(value, dict):
        raise InvalidInput(
            f"record {number} of {path} is not a JSON object",
            field=field,
            hint='each element must be like {"prompt": "..."}',
        )
    return value


def _not_array_error(path: str, problem: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is not a JSON array: {problem}",
        field=field,
        hint="write one array of objects, or one JSON object in each line, in UTF-8",
    )


def _lines_start(stream: BinaryIO, path: str, field: str) -> tuple[list[Record], bool]:
    """Return the first records of JSON lines, and whether the whole file was read."""
    content = stream.read(_START_BYTES)
    if b"\0" in content[:4096] or content.startswith(PARQUET_MAGIC):
        raise InvalidInput(
            f"{path} is a binary file, not JSON lines",
            field=field,
            hint="write one JSON object in each line, in UTF-8; a Parquet file ends in .parquet",
        )
    is_complete = len(content) < _START_BYTES
    lines = content.split(b"\n")
    located = enumerate(lines if is_complete else lines[:-1], 1)
    parsed = (record_in(line, f"{path}:{number}", field) for number, line in located)
    with _hint_of(path):
        records = list[Record](
            islice((record for record in parsed if record is not None), START_RECORDS)
        )
    if suffix_of(path) == ".json" and is_complete and len(records) == 1:
        _refuse_object(records[0], path, field)
    return records, is_complete


def _refuse_object(record: Record, path: str, field: str) -> None:
    """Raise InvalidInput if the only record of a .json file has all records in one of its keys."""
    if len(record) == 1 and (key := list_key(record)):
        raise InvalidInput(
            f"{path} is one object, whose key {key!r} holds the records",
            field=field,
            hint="write the array of this key alone, such as with jq .KEY",
        )


def list_key(record: Record) -> str | None:
    """Return the first key whose value is a list of objects other than messages, or None."""
    for key, value in record.items():
        match value:
            case [{} as first, *_] if not first.keys() & {"role", "from"}:
                return key
    return None


@contextmanager
def _hint_of(path: str) -> Iterator[None]:
    """Give an error of a .json file a hint with both forms: one array, or one object per line."""
    try:
        yield
    except InvalidInput as error:
        if suffix_of(path) == ".json":
            error.hint = "write one array of objects, [{...}, {...}], or one object in each line"
        raise


def record_in(line: bytes, location: str, field: str) -> dict[str, Any] | None:
    """Parse a line of a .jsonl file. Returns None if the line is blank.

    `location`: the line for messages, such as `data.jsonl:3`. Raises InvalidInput, naming `field`,
    if the line is not a JSON object in UTF-8.
    """
    try:
        text = line.decode("utf-8-sig").strip()
        record = parse_json(text) if text else None
    except ValueError as error:
        raise InvalidInput(
            f"{location} is not JSON: {error}",
            field=field,
            hint="each line must be one JSON object, in UTF-8",
        ) from error
    if text and not isinstance(record, dict):
        raise InvalidInput(
            f"{location} is not a JSON object",
            field=field,
            hint='each line must be like {"prompt": "..."}',
        )
    return record


def _read_csv(stream: BinaryIO, path: str, field: str) -> tuple[list[str], Iterator[Record]]:
    """Return the columns of a CSV file and its records, whose values are texts."""
    rows = _csv_rows(stream, path, field)
    _, columns = next(rows, (0, list[str]()))
    if twice := [name for number, name in enumerate(columns) if name in columns[:number]]:
        raise InvalidInput(
            f"{path} has two columns {twice[0]!r}", field=field, hint="rename one of them"
        )

    def records() -> Iterator[Record]:
        for line, cells in rows:
            if len(cells) != len(columns):
                raise InvalidInput(
                    f"{path}:{line} has {len(cells)} values, but the first line names"
                    f" {len(columns)} columns",
                    field=field,
                    hint="write a value with a comma, a quote or a line end in quotes",
                )
            yield dict(zip(columns, cells, strict=True))

    return columns, records()


def _csv_rows(stream: BinaryIO, path: str, field: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) for each row. Empty lines are skipped.

    The number is that of the row's last line. The delimiter is the comma. If the first line has no
    comma, the delimiter is the semicolon or the tab that this line contains.
    """
    csv.field_size_limit(MAX_BYTES)  # characters of a value; the module's default is 128 Ki
    encodings = chain(["utf-8-sig"], repeat("utf-8"))  # only the first line may begin with a BOM
    lines = (
        line.decode(encoding)
        for line, encoding in zip(_lines_of(stream, path, field), encodings, strict=False)
    )
    reader: Any = None
    try:
        first = next(lines, "")
        delimiter = next((mark for mark in ",;\t" if mark in first), ",")
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{path}:{max(reader.line_num, 1) if reader else 1} is not CSV: {error}",
            field=field,
            hint="write commas between values, in UTF-8, and double the quotes of a quoted value",
        ) from error


def _csv_start(stream: BinaryIO, path: str, field: str) -> tuple[list[str], list[Record], bool]:
    """Return the columns of a CSV file, its first records, and whether the whole file was read."""
    content = stream.read(_START_BYTES)
    is_complete = len(content) < _START_BYTES
    if not is_complete:
        content = content[: content.rfind(b"\n") + 1]
    columns, rows = _read_csv(io.BytesIO(content), path, field)
    records = list[Record]()
    try:
        for record in islice(rows, START_RECORDS):
            records.append(record)
    except InvalidInput as error:
        # A value with line ends may be cut.
        if is_complete or "unexpected end of data" not in error.message:
            raise
    return columns, records, is_complete


def _no_records_error(path: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"{path} has no records", field=field, hint="give a file with at least one record"
    )
