"""Reads Parquet files, and converts Arrow's records to the form of .jsonl records."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

from clients.data.outside import open_regular
from protos.errors import InvalidInput

Record: TypeAlias = Mapping[str, Any]

PARQUET_MAGIC = b"PAR1"
# pyarrow's default is 65,536 rows at once: gigabytes of long texts or images.
_MAX_BATCH_ROWS, _BATCH_BYTES = 4096, 16 << 20
# Without it, pyarrow reads a whole column of a row group at once.
_BUFFER_BYTES = 1 << 20


def read_parquet(path: str, columns: Sequence[str], field: str) -> Iterator[Record]:
    """Yield the records of a Parquet file.

    A record has each of `columns` that exists. If the first of `columns` does not exist, or
    `columns` is empty, a record has all columns. Raises InvalidInput, naming `field`, if the file
    is damaged or a text is not UTF-8.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
        existing_columns = [name for name in file.schema_arrow.names if name in columns]
        # If the first column does not exist, read all: the error message lists the existing ones.
        selected_columns = existing_columns if columns and columns[0] in existing_columns else None
        rows = _rows_per_batch(file.metadata)
        for batch in file.iter_batches(rows, columns=selected_columns):
            yield from records_in(batch)
    # A text that is not UTF-8 is a UnicodeDecodeError, which is a ValueError too.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidInput(
            f"{path} cannot be read as Parquet: {first_line(error)}",
            field=field,
            hint="write the file again, with texts in UTF-8",
        ) from error


def count_parquet(path: str, field: str) -> int:
    """Return the number of rows of a Parquet file.

    Raises InvalidInput, naming `field`, if the file cannot be read.
    """
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise _not_parquet_error(path, first_line(error), field) from error


def _rows_per_batch(metadata: Any) -> int:
    """Return the number of rows that take about _BATCH_BYTES.

    A value that a dictionary stores once for several rows is counted once. `metadata`: a
    pyarrow.parquet.FileMetaData.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
    return max(1, min(_MAX_BATCH_ROWS, int(_BATCH_BYTES / max(1, row_bytes))))


def read_parquet_start(
    path: str, field: str, count: int, max_bytes: int
) -> tuple[list[str], list[Record]]:
    """Return the columns and the first `count` records. Both are empty if pyarrow is not installed.

    There are fewer records if they have more than `max_bytes`, but at least one. The memory is a
    small multiple of the longest pages of the columns, because pyarrow decompresses whole pages.
    """
    with open_regular(Path(path)) as file:
        if file.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
            raise _not_parquet_error(path, "the file does not start with PAR1", field)
        if not has_pyarrow():
            return [], []
        import pyarrow
        import pyarrow.parquet

        file.seek(0)
        try:
            parquet = pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES)
            groups = range(parquet.metadata.num_row_groups)
            full_groups = [n for n in groups if parquet.metadata.row_group(n).num_rows][:1]
            # One row at a time: eight rows can repeat one long value of a dictionary.
            records, read_bytes = list[Record](), 0
            for batch in parquet.iter_batches(1, row_groups=full_groups):
                records += records_in(batch)
                read_bytes += batch.nbytes
                if len(records) == count or read_bytes > max_bytes:
                    break
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _not_parquet_error(path, first_line(error), field) from error
    return list(parquet.schema_arrow.names), records


def records_in(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of a pyarrow.RecordBatch in the form of .jsonl records.

    Raises ValueError for a text that is not UTF-8.
    """
    narrow_types = ("halffloat", "float")
    float32_columns = {entry.name for entry in batch.schema if str(entry.type) in narrow_types}
    for record in batch.to_pylist():
        yield from_arrow(record, float32_columns)


def from_arrow(record: Record, float32_columns: Set[str]) -> dict[str, Any]:
    """Convert an Arrow record to the form of a .jsonl record.

    Keys of structs with the value null are removed, because Arrow adds the keys of other rows. A
    float32 0.1 becomes 0.1, not 0.10000000149011612.
    """
    from numpy import float32

    return {
        column: float(str(float32(value)))
        if column in float32_columns and isinstance(value, float)
        else _without_nulls(value)
        for column, value in record.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _not_parquet_error(path: str, problem: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is not a Parquet file: {problem.rstrip('.')}",
        field=field,
        hint="write the file again; the name of a file of JSON lines ends in .jsonl",
    )


def has_pyarrow() -> bool:
    """Return whether pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
