"""Checks that the data files of a job can be read: format, first records and columns.

Only the first records of a file are read, so a check takes milliseconds for a file of any size.
Hub ids, URLs and directories are left to the job's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from clients.config.tables.data import Columns, DataFile
from clients.config.tables.job import JobConfig
from clients.data.formats import (
    exists_here,
    files_of,
    list_key,
    read_start,
    suffix_of,
    unknown_format_error,
)
from clients.data.images import image_file
from clients.data.object_urls import is_object_url
from clients.data.prompt_format import PromptFormat
from clients.data.records import images_of, weight_of
from clients.preflight.columns import fit_columns
from clients.preflight.limits import Limits
from protos.errors import InvalidInput

# File suffixes that no hub id has: such a name is refused even if the file does not exist.
_REFUSED_SUFFIXES = (".tsv", ".txt", ".xlsx")

# The first records of a file.
Records: TypeAlias = Sequence[Mapping[str, Any]]


def check_data(config: JobConfig, *, only_existing: bool = False) -> None:
    """Raise InvalidInput if a local data file cannot be read or lacks a column that is read.

    A file is refused if its format is not supported, if it has no records, or if a column is in
    none of its first records. Columns that the job does not set are recognised. Never blocks on a
    pipe. `only_existing`: ignore missing files, which the server may have.
    """
    columns, _ = fit_columns(config, config.data_files)
    for data_file in Limits(columns).apply(config).data_files:
        is_skipped = only_existing and not exists_here(data_file.path)
        if not is_skipped and not is_object_url(data_file.path):
            check_data_file(data_file)


def check_data_file(data_file: DataFile) -> None:
    """Check the files of a DataFile, as `check_data` does; not hub ids and directories."""
    path, field = data_file.path, data_file.field
    try:
        if not suffix_of(path) and path.endswith(_REFUSED_SUFFIXES):
            raise unknown_format_error(path, field)
        for name in files_of(path, field):
            columns, records = read_start(name, field)
            _check_records(replace(data_file, path=name), columns, records)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {error.filename or path}: {error.strerror or error}",
            field=field,
            hint="give a regular file that the job's program may read",
        ) from error


def _check_records(data_file: DataFile, columns: Sequence[str], records: Records) -> None:
    for key, column in _expected_columns(data_file):
        if columns and column not in columns:
            raise InvalidInput(
                f"{data_file.path} has no column {column!r}; the data has the"
                f" column{'s' * (len(columns) > 1)} {', '.join(columns)}",
                field=key,
                hint=_column_hint(key, column, data_file, records),
            )
    if data_file.prompts is not None:
        _check_prompts(data_file, data_file.prompts, records)


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
    """Return the columns that the file must have.

    The reference of a conversation is its last message if that is the assistant's, so the column of
    answers may be missing.
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


def _check_prompts(data_file: DataFile, prompts: PromptFormat, records: Records) -> None:
    """Raise InvalidInput if the first records are wrong: conversations, weights, images, answers.

    A record without the column of a check is accepted by this function.
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
