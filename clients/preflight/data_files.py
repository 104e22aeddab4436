"""Checks that the data files of a job can be read: format, first records and columns.

Only the first records of a file are read, so a check takes milliseconds for a file of any size.
Hub ids, URLs and directories are left to the job's program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, assert_never

from clients.config.capture import CaptureData, CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.kinds import AnyJob
from clients.config.offline import OfflineData, OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.data import DataConfig
from clients.config.tables.reward import RewardConfig
from clients.data.conversation import columns_named
from clients.data.images import image_file
from clients.data.object_urls import is_object_url
from clients.data.records import FILE_SUFFIXES, images_of, record_in, records_in, weight_of
from clients.data.regular_file import open_regular
from protos.errors import InvalidInput

# Column names by the keys that set them.
Columns: TypeAlias = tuple[tuple[str, str], ...]
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
# The column of a retriever's file of passages (student_trainer/environments/retriever.py).
_PASSAGES = "contents"


@dataclass(frozen=True)
class Expected:
    """A data file, and the columns that the job reads.

    field: the key that names the file. columns: the columns that must exist. check: raises
    InvalidInput if the first records cannot be used; None accepts them.
    """

    field: str
    path: str
    columns: Columns
    check: Callable[[Records], None] | None = None


def check_data(config: AnyJob) -> None:
    """Raise InvalidInput if a local data file cannot be read or lacks a column that is read.

    A file is refused if its format is not .jsonl or .parquet, if it has no records, or if a column
    is in none of its first records. Never blocks on a pipe.
    """
    for data_file in data_files(config):
        if not is_object_url(data_file.path):
            check_file(data_file)


def data_files(config: AnyJob) -> Iterator[Expected]:
    """Yield the data files and hub data sets that the job's program will read."""
    match config:
        case CaptureJob():
            yield _capture_file(config)
        case OfflineJob():
            if config.eval.metric != "none" and config.data.eval_prompts is not None:
                path = config.data.eval_prompts
                yield expected_prompts("data.eval_prompts", path, config.data, answers=True)
        case EvalJob():
            if config.data is not None:
                answers = needs_reference(config.reward)
                yield expected_prompts("data.path", config.data.path, config.data, answers=answers)
        case OnPolicyJob() | RLJob() | SFTJob():
            if config.data is not None:
                yield from _prompt_files(config, config.data)
            search_environment = config.environment if isinstance(config, RLJob) else None
            if search_environment is not None and not search_environment.remote:
                passage_columns = (("environment.retriever", _PASSAGES),)
                yield Expected(
                    "environment.retriever", search_environment.retriever, passage_columns
                )
        case _:
            assert_never(config)


def check_file(data_file: Expected) -> None:
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
    for key, column in data_file.columns:
        if columns and column not in columns:
            raise InvalidInput(
                f"{data_file.path} has no column {column!r}; the data has the"
                f" column{'s' * (len(columns) > 1)} {', '.join(columns)}",
                field=key,
                hint=_column_hint(key, column, data_file.field),
            )
    if data_file.check is not None:
        data_file.check(records)


def _column_hint(key: str, column: str, file_key: str) -> str:
    if key.endswith(".context"):
        return "name one of them in it"
    return f"rename a column to {column!r}" if key == file_key else f"set {key} to one of them"


def expected_prompts(
    field: str,
    path: str,
    data: DataConfig | OfflineData | CaptureData,
    *,
    answers: bool,
    learns_answers: bool = False,
    extra_columns: Columns = (),
) -> Expected:
    """Return a file of prompts with the columns that it must have.

    `answers`: reference answers too. The reference of a conversation is its last message if that is
    the assistant's, so the column of answers may be missing. `learns_answers`: the answers are
    learned or captured; those of a conversation are always its messages. `extra_columns`: columns
    in addition to those of the prompt.
    """
    messages_column = data.prompt_format.messages_column
    if messages_column is None:
        columns: Columns = (("data.prompt_column", data.prompt_column),)
        columns += (("data.answer_column", data.answer_column),) if answers else ()
    else:
        columns = (("data.messages_column", messages_column),)

    if (image_column := data.prompt_format.image_column) is not None:
        columns += (("data.image_column", image_column),)

    def check(records: Records) -> None:
        check_first_prompts(path, data, records, answers=answers, learns_answers=learns_answers)

    return Expected(field, path, columns + extra_columns, check)


def check_first_prompts(
    path: str,
    data: DataConfig | OfflineData | CaptureData,
    records: Records,
    *,
    answers: bool,
    learns_answers: bool,
) -> None:
    """Raise InvalidInput if the first records are wrong: conversations, weights, images, answers.

    `records`: the first ones of the file `path`. A record without the column is not refused here.
    """
    has_answer = False
    prompt_format, weight_column = data.prompt_format, getattr(data, "weight_column", None)
    messages_column = prompt_format.messages_column
    for number, record in enumerate(records, 1):
        location = f"row {number} of {path}"
        if weight_column is not None and weight_column in record:
            weight_of(record, weight_column, location)
        if prompt_format.image_column is not None and prompt_format.image_column in record:
            for image in images_of(record, prompt_format.image_column, location):
                if isinstance(image, str):
                    image_file(Path(path).parent, image, location)
        has_answer |= not learns_answers and record.get(data.answer_column) is not None
        if messages_column in record:
            conversation = prompt_format.conversation(record, location)
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
    if answers:
        raise InvalidInput(
            f"the conversations of {path} do not end with the assistant's message, and there is no"
            f" column {data.answer_column!r}",
            field="data.answer_column",
            hint="set it to the column of the reference answers",
        )


def needs_reference(reward: RewardConfig | None) -> bool:
    """Return True if the reward compares answers with the column `data.answer_column`."""
    if reward is None or reward.task is not None or reward.type == "python":
        return False
    return reward.type != "regex" or re.compile(reward.pattern or "").groups > 0


def _prompt_files(job: OnPolicyJob | RLJob | SFTJob, data: DataConfig) -> Iterator[Expected]:
    reward_needs_answers = isinstance(job, RLJob) and needs_reference(job.reward)
    learns_answers = isinstance(job, SFTJob)
    has_several_teachers = isinstance(job, OnPolicyJob) and bool(job.teachers)
    teacher_columns: Columns = (
        (("data.teacher_column", data.teacher_column),) if has_several_teachers else ()
    )
    if isinstance(job, OnPolicyJob):
        teacher_columns += _context_columns("teacher.context", job.teacher.context)
    elif isinstance(job, RLJob):
        teacher_columns += _context_columns("anchor.context", job.anchor.context)
    weight_columns: Columns = ()
    if data.weight_column is not None:
        weight_columns = (("data.weight_column", data.weight_column),)
    is_evaluated = job.eval.metric != "none"
    for field, path in data.training_paths:
        is_held_out_source = field == "data.path" and data.eval_path is None
        needs_answers = (
            learns_answers or reward_needs_answers or (is_evaluated and is_held_out_source)
        )
        yield expected_prompts(
            field,
            path,
            data,
            answers=needs_answers,
            learns_answers=learns_answers,
            extra_columns=teacher_columns + weight_columns,
        )
    if data.eval_path is not None:
        needs_answers = learns_answers or reward_needs_answers or is_evaluated
        field, path = "data.eval_path", data.eval_path
        yield expected_prompts(
            field,
            path,
            data.without_weights(),
            answers=needs_answers,
            learns_answers=learns_answers,
            extra_columns=teacher_columns,
        )


def _context_columns(key: str, context: str | None) -> Columns:
    return tuple((key, column) for column in columns_named(context or ""))


def _capture_file(job: CaptureJob) -> Expected:
    data, context_columns = job.data, _context_columns("teacher.context", job.teacher.context)
    text_columns = (("data.text_column", data.text_column),)
    if data.form == "text":
        return Expected("data.path", data.path, text_columns + context_columns)
    # A capture scores the tokens that a fine-tuning job would learn.
    return expected_prompts(
        "data.path",
        data.path,
        data,
        answers=True,
        learns_answers=True,
        extra_columns=context_columns,
    )


def _unknown_format_error(data_file: Expected) -> InvalidInput:
    path = Path(data_file.path)
    reader = _READERS.get(path.suffix)
    converted_path = str(path.with_suffix(".jsonl"))
    call = f"import datasets as d; d.Dataset.{reader}({str(path)!r}).to_json({converted_path!r})"
    return InvalidInput(
        f"{data_file.path} is neither a .jsonl nor a .parquet file, the two formats that are read",
        field=data_file.field,
        hint=f'convert it: python -c "{call}"' if reader else "convert it to one of them",
    )


def _read_json_start(file: BinaryIO, data_file: Expected) -> tuple[list[str], Records]:
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


def _read_parquet_start(file: BinaryIO, data_file: Expected) -> tuple[list[str], Records]:
    """Return the columns of the schema and the first records; both empty without pyarrow.

    The records are read only if the job checks them.
    """
    if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
        raise _not_parquet_error(data_file, "it does not start with PAR1")
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
    if data_file.check is None:
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


def _not_parquet_error(data_file: Expected, problem: str) -> InvalidInput:
    return InvalidInput(
        f"{data_file.path} is not a Parquet file: {problem.rstrip('.')}",
        field=data_file.field,
        hint="write the file again; the name of a file of JSON lines ends in .jsonl",
    )


def _no_records_error(data_file: Expected) -> InvalidInput:
    return InvalidInput(
        f"{data_file.path} has no records",
        field=data_file.field,
        hint="give a file with at least one record",
    )
