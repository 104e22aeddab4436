"""Checks that the data files of a job can be read: format, first records and columns.

Only the first records of a file are read, so a check takes milliseconds for a file of any size.
Hub ids, URLs and directories are left to the job's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from clients.config.tables.data import Columns, DataFile
from clients.config.tables.job import JobConfig
from clients.data.images import image_file
from clients.data.object_urls import is_object_url
from clients.data.outside import open_regular
from clients.data.prompt_format import PromptFormat
from clients.data.records import FILE_SUFFIXES, images_of, record_in, records_in, weight_of
from protos.errors import InvalidInput

# The first records of a file.
Records: TypeAlias = Sequence[Mapping[str, Any]]

_MAX_RECORDS = 8
# Bytes that are read to find the first records. A longer line is not parsed.
_MAX_BYTES = 1 << 20
# File suffixes that no hub id has: such a name is refused even if the file does not exist.
_REFUSED_SUFFIXES = (".csv", ".tsv", ".json", ".txt", ".xlsx")
_PARQUET_MAGIC = b"PAR1"
# Calls of the package `datasets` that read other formats.
_READERS = {".csv": "from_csv", ".json": "from_json", ".txt": "from_text"}


def check_data(config: JobConfig) -> None:
    """Raise InvalidInput if a local data file cannot be read or lacks a column that is read.

    A file is refused if its format is not .jsonl or .parquet, if it has no records, or if a column
    is in none of its first records. Never blocks on a pipe.
    """
    for data_file in config.data_files:
        if not is_object_url(data_file.path):
            check_file(data_file)


def check_file(data_file: DataFile) -> None:
    """Check one data file, as `check_data` does; hub ids and directories are not checked."""
    path = Path(data_file.path)
    try:
        if path.suffix not in FILE_SUFFIXES:
            if path.suffix in _REFUSED_SUFFIXES or path.is_file():
                raise _unknown_format_error(data_file)
            return
        with open_regular(path) as file:
            read_start = _read_json_start if path.suffix == ".jsonl" else _read_parquet_start
            columns, records = read_start(file, data_file)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {data_file.path}: {error.strerror or error}",
            field=data_file.field,
            hint="give a regular file that the job's program may read",
        ) from error
    for key, column in _expected_columns(data_file):
        if columns and column not in columns:
            raise InvalidInput(
                f"{data_file.path} has no column {column!r}; the data has the"
                f" column{'s' * (len(columns) > 1)} {', '.join(columns)}",
                field=key,
                hint=_column_hint(key, column, data_file.field),
            )
    if data_file.prompts is not None:
        _check_prompts(data_file, data_file.prompts, records)


def _column_hint(key: str, column: str, file_key: str) -> str:
    if key.endswith(".context"):
        return "set the key to one of these columns"
    return (
        f"rename a column to {column!r}"
        if key == file_key
        else f"set {key} to one of these columns"
    )


def _expected_columns(data_file: DataFile) -> Columns:
    """Return the columns that the file must have.

    The reference of a conversation is its last message if that is the assistant's, so the column of
    answers may be missing.
    """
    prompts, weight_column, columns = data_file.prompts, data_file.weight_column, data_file.columns
    if weight_column is not None:
        columns = (("data.weight_column", weight_column), *columns)
    if prompts is None:
        return columns
    if prompts.image_column is not None:
        columns = (("data.image_column", prompts.image_column), *columns)
    if prompts.messages_column is not None:
        return (("data.messages_column", prompts.messages_column), *columns)
    if data_file.answers:
        columns = (("data.answer_column", data_file.answer_column), *columns)
    return (("data.prompt_column", prompts.prompt_column), *columns)


def _check_prompts(data_file: DataFile, prompts: PromptFormat, records: Records) -> None:
    """Raise InvalidInput if the first records are wrong: conversations, weights, images, answers.

    A record without the column is not refused here.
    """
    path, weight_column = data_file.path, data_file.weight_column
    messages_column, learns_answers = prompts.messages_column, data_file.learns_answers
    has_answer = False
    for number, record in enumerate(records, 1):
        location = f"row {number} of {path}"
        if weight_column is not None and weight_column in record:
            weight_of(record, weight_column, location)
        if prompts.image_column is not None and prompts.image_column in record:
            for image in images_of(record, prompts.image_column, location):
                if isinstance(image, str):
                    image_file(Path(path).parent, image, location)
        has_answer |= not learns_answers and record.get(data_file.answer_column) is not None
        if messages_column in record:
            conversation = prompts.conversation(record, location)
            has_answer |= (
                conversation.up_to_answer() if learns_answers else conversation
            ).is_answered
    if messages_column is None or not records or has_answer:
        return
    if learns_answers:
        raise InvalidInput(
            f"the conversations of {path} have no message of the assistant",
            field="data.messages_column",
            hint='add messages like {"role": "assistant", "content": "..."}',
        )
    if data_file.answers:
        raise InvalidInput(
            f"the conversations of {path} do not end with the assistant's message, and there is no"
            f" column {data_file.answer_column!r}",
            field="data.answer_column",
            hint="set the key to the column of the reference answers",
        )


def _unknown_format_error(data_file: DataFile) -> InvalidInput:
    path = Path(data_file.path)
    reader = _READERS.get(path.suffix)
    converted_path = str(path.with_suffix(".jsonl"))
    call = f"import datasets as d; d.Dataset.{reader}({str(path)!r}).to_json({converted_path!r})"
    return InvalidInput(
        f"{data_file.path} is neither a .jsonl nor a .parquet file, the two supported formats",
        field=data_file.field,
        hint=f'convert the file: python -c "{call}"'
        if reader
        else "convert the file to one of these formats",
    )


def _read_json_start(file: BinaryIO, data_file: DataFile) -> tuple[list[str], Records]:
    """Return the columns and the first records; both empty if the first line is very long."""
    content = file.read(_MAX_BYTES)
    if b"\0" in content[:4096] or content.startswith(_PARQUET_MAGIC):
        raise InvalidInput(
            f"{data_file.path} is a binary file, not JSON lines",
            field=data_file.field,
            hint="write one JSON object in each line, in UTF-8; a Parquet file ends in .parquet",
        )
    lines = content.split(b"\n")
    is_complete = len(content) < _MAX_BYTES
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines if is_complete else lines[:-1], 1):
        record = record_in(line, f"{data_file.path}:{number}", data_file.field)
        if record is not None:
            records.append(record)
        if len(records) == _MAX_RECORDS:
            break
    if is_complete and not records:
        raise _no_records_error(data_file)
    return list(dict.fromkeys(column for record in records for column in record)), records


def _read_parquet_start(file: BinaryIO, data_file: DataFile) -> tuple[list[str], Records]:
    """Return the columns of the schema and the first records; both empty without pyarrow.

    The records are read only if the job checks them.
    """
    if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
        raise _not_parquet_error(data_file, "the file does not start with PAR1")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return [], []
    file.seek(0)
    try:
        parquet_file = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise _not_parquet_error(
            data_file, (str(error).splitlines() or ["no footer"])[0]
        ) from error
    if not parquet_file.metadata.num_rows:
        raise _no_records_error(data_file)
    if data_file.prompts is None:
        return list(parquet_file.schema_arrow.names), []
    try:
        groups = range(parquet_file.metadata.num_row_groups)
        group_with_rows = next(
            group for group in groups if parquet_file.metadata.row_group(group).num_rows
        )
        batch = next(
            parquet_file.iter_batches(batch_size=_MAX_RECORDS, row_groups=[group_with_rows])
        )
        records = list(records_in(batch))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _not_parquet_error(data_file, (str(error).splitlines() or ["damaged"])[0]) from error
    return list(parquet_file.schema_arrow.names), records


def _not_parquet_error(data_file: DataFile, problem: str) -> InvalidInput:
    return InvalidInput(
        f"{data_file.path} is not a Parquet file: {problem.rstrip('.')}",
        field=data_file.field,
        hint="write the file again; the name of a file of JSON lines ends in .jsonl",
    )


def _no_records_error(data_file: DataFile) -> InvalidInput:
    return InvalidInput(
        f"{data_file.path} has no records",
        field=data_file.field,
        hint="give a file with at least one record",
    )
