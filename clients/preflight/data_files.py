"""Checks that the data files of a job can be read: format, records and columns.

`check_data` reads only the first records of a file, so a check takes milliseconds for a file of any
size. `check_all_records` reads the whole file. Data sets at hub ids, URLs and directories are
checked by the job's program.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from clients.config.file import is_file_name, similar_path
from clients.config.tables.data import Columns, DataFile
from clients.config.tables.job import JobConfig
from clients.data.formats import (
    exists_here,
    files_of,
    is_pattern,
    list_key,
    read_start,
    suffix_of,
    unknown_format_error,
)
from clients.data.images import image_file
from clients.data.object_urls import is_object_url
from clients.data.parquet import has_pyarrow
from clients.data.prompt_format import PromptFormat
from clients.data.records import DataSet, images_of, text_of, weight_of
from clients.preflight.columns import fit_columns
from clients.preflight.limits import Limits
from protos.errors import InvalidInput

# File suffixes that no hub id has: such a name is refused even if the file does not exist.
_REFUSED_SUFFIXES = (".tsv", ".txt", ".xlsx")

# Reading a file of this size takes minutes.
_MAX_CHECKED_BYTES = 2 << 30
_SECONDS_BETWEEN_REPORTS = 10.0

# The first records of a file; a record with its place for messages.
Records: TypeAlias = Sequence[Mapping[str, Any]]
Row: TypeAlias = tuple[str, Mapping[str, Any]]


def check_data(config: JobConfig, *, only_existing: bool = False) -> None:
    """Raise InvalidInput if a local data file cannot be read or lacks a column that the job reads.

    A file is refused if its format is not supported, if it has no records, or if a column is in
    none of its first records. Columns that the job does not set are recognised first. The check
    never blocks on a pipe. `only_existing`: ignore missing files, which the server may have.
    """
    columns, _ = fit_columns(config, config.data_files)
    for data_file in Limits(columns).apply(config).data_files:
        is_skipped = only_existing and not exists_here(data_file.path)
        if not is_skipped and not is_object_url(data_file.path):
            check_data_file(data_file)


def check_data_file(data_file: DataFile) -> None:
    """Check one data file, or all files of its pattern, as `check_data` does.

    Hub ids and directories are not checked.
    """
    path, field = data_file.path, data_file.field
    try:
        if not suffix_of(path) and path.endswith(_REFUSED_SUFFIXES):
            raise unknown_format_error(path, field)
        for name in files_of(path, field):
            columns, records = read_start(name, field)
            _check_columns(replace(data_file, path=name), columns, records)
            if data_file.prompts is not None:
                rows = ((f"row {row} of {name}", record) for row, record in enumerate(records, 1))
                _check_prompts(replace(data_file, path=name), data_file.prompts, rows)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {error.filename or path}: {error.strerror or error}",
            field=field,
            hint="give a regular file that the job's program may read",
        ) from error


def check_all_records(config: JobConfig, report: Callable[[str], None]) -> None:
    """Raise InvalidInput if a line of a local data file or a value of a record cannot be used.

    The columns must be set in `config`, by the job or by `fit_columns`. Tokens are not checked.
    `report`: a function that shows a text to the user. The texts are the progress, every few
    seconds, and the names of data sets that are not read: files that are too large or need pyarrow,
    directories, URLs and hub ids.
    """
    for data_file in config.data_files:
        path, prompts = data_file.path, data_file.prompts
        is_url, is_here = is_object_url(path), exists_here(path)
        if not is_url and not is_here and (is_file_name(path) or is_pattern(path)):
            continue
        data_set = DataSet(path, field=data_file.field)
        if is_url or not is_here or not data_set.files:
            similar = "" if is_url or is_here else similar_path(Path(path))
            report(
                f"{data_file.field}: the records of {path} are not checked here; the job checks"
                f" them at its start{f'. Did you mean {similar}?' if similar else ''}"
            )
            continue
        size = sum(Path(name).stat().st_size for name in data_set.files)
        lacks_pyarrow = path.endswith((".parquet", ".zst")) and not has_pyarrow()
        if lacks_pyarrow or size > _MAX_CHECKED_BYTES:
            reason = "needs pyarrow" if lacks_pyarrow else f"has {size / 1e9:.1f} GB"
            report(
                f"{data_file.field}: {path} {reason}: not all of its records are checked here; the"
                " job checks them at its start"
            )
            continue
        columns = [] if prompts is None else [*prompts.columns, data_file.answer_column]
        if columns and data_file.weight_column is not None:
            columns.append(data_file.weight_column)
        rows = _report_progress(data_set.rows(columns), data_file.field, report)
        if prompts is None:
            deque(rows, maxlen=0)
        else:
            for location, record in rows:
                _check_record(data_file, prompts, record, location)


def _report_progress(
    rows: Iterable[Row], field: str, report: Callable[[str], None]
) -> Iterator[Row]:
    reported_at = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - reported_at > _SECONDS_BETWEEN_REPORTS:
            reported_at = time.monotonic()
            report(f"checking {field}: {number:,} records so far")
        yield row


def _check_columns(data_file: DataFile, columns: Sequence[str], records: Records) -> None:
    for key, column in _expected_columns(data_file):
        if columns and column not in columns:
            raise InvalidInput(
                f"{data_file.path} has no column {column!r}; the data has the"
                f" column{'s' * (len(columns) > 1)} {', '.join(columns)}",
                field=key,
                hint=_column_hint(key, column, data_file, records),
            )


def _column_hint(key: str, column: str, data_file: DataFile, records: Records) -> str:
    if (
        suffix_of(data_file.path) == ".json"
        and len(records) == 1
        and (name := list_key(records[0]))
    ):
        return (
            f"if {name!r} holds the records, write the array of this key alone, such as with jq"
            f" .{name}"
        )
    if key.endswith(".context"):
        return "set the key to one of these columns"
    return (
        f"rename a column to {column!r}"
        if key == data_file.field
        else f"set {key} to one of these columns"
    )


def _expected_columns(data_file: DataFile) -> Columns:
    """Return (key, column) for each column that the file must have.

    For conversations, the column of answers may be missing: if the last message is an assistant
    message, it is the reference answer.
    """
    prompts, weight_column, columns = data_file.prompts, data_file.weight_column, data_file.columns
    if weight_column is not None:
        columns = (("data.weight_column", weight_column), *columns)
    if prompts is None:
        return columns
    for key in ("image_column", "input_column", "completion_column"):
        if (column := getattr(prompts, key)) is not None:
            columns = ((f"data.{key}", column), *columns)
    if prompts.messages_column is not None:
        return (("data.messages_column", prompts.messages_column), *columns)
    if data_file.answers:
        columns = (("data.answer_column", data_file.answer_column), *columns)
    return (("data.prompt_column", prompts.prompt_column), *columns)


def _check_prompts(data_file: DataFile, prompts: PromptFormat, rows: Iterable[Row]) -> None:
    """Raise InvalidInput if the first records have a wrong value, or conversations but no answer.

    A record that lacks a column is accepted here, because another of the first records has the
    column.
    """
    path, learns_answers = data_file.path, data_file.learns_answers
    are_answered = [
        _check_record(data_file, prompts, record, location, is_complete=False)
        for location, record in rows
    ]
    if prompts.messages_column is None or not are_answered or any(are_answered):
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


def _check_record(
    data_file: DataFile,
    prompts: PromptFormat,
    record: Mapping[str, Any],
    location: str,
    *,
    is_complete: bool = True,
) -> bool:
    """Raise InvalidInput if a value of a record is wrong. Return whether the record has an answer.

    `is_complete`: whether to refuse also a record that lacks a column, or an answer that is not
    text.
    """
    column, learns_answers = data_file.answer_column, data_file.learns_answers

    def is_checked(name: str | None) -> TypeGuard[str]:
        return name is not None and (is_complete or name in record)

    if is_checked(data_file.weight_column):
        weight_of(record, data_file.weight_column, location)
    if is_checked(prompts.image_column):
        for image in images_of(record, prompts.image_column, location):
            if isinstance(image, str):
                image_file(Path(data_file.path).parent, image, location)
    has_answer = record.get(column) is not None
    is_conversation = prompts.messages_column is not None
    if is_complete and (has_answer or (learns_answers and not is_conversation)):
        text_of(record, column, "data.answer_column", location)
    if not is_complete and not is_checked(prompts.messages_column):
        return has_answer and not learns_answers
    conversation = prompts.conversation(record, location)
    if learns_answers:
        return conversation.up_to_answer().is_answered
    return has_answer or conversation.is_answered
