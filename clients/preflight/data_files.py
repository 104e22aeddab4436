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
from clients.data.records import FILE_SUFFIXES, images_of, record_in, weight_of
from clients.data.regular_file import open_regular
from protos.errors import InvalidInput

# Column names by the keys that set them.
Columns: TypeAlias = tuple[tuple[str, str], ...]
# The first records of a file.
Records: TypeAlias = Sequence[Mapping[str, Any]]

_MOST_RECORDS = 8
# Bytes that are read in search of the first records. A longer line is not parsed.
_MOST_BYTES = 1 << 20
# Suffixes of files that no hub id has: such a name is refused even if there is no such file.
_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".txt", ".xlsx")
_PARQUET_MAGIC = b"PAR1"
# Calls of the package `datasets` that read other formats.
_READERS = {".csv": "from_csv", ".json": "from_json", ".txt": "from_text"}
# The column of a retriever's file of passages (student_trainer/environments/local_retriever.py).
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
    for expected in data_files(config):
        if not is_object_url(expected.path):
            check_file(expected)


def data_files(config: AnyJob) -> Iterator[Expected]:
    """Yield the data files and hub data sets that the job's program will read."""
    match config:
        case CaptureJob():
            yield _captured(config)
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
                yield from _prompts(config, config.data)
            searched = config.environment if isinstance(config, RLJob) else None
            if searched is not None and not searched.remote:
                passages = (("environment.retriever", _PASSAGES),)
                yield Expected("environment.retriever", searched.retriever, passages)
        case _:
            assert_never(config)


def check_file(expected: Expected) -> None:
    """Check one data file, as `check_data` does; hub ids and directories are not checked."""
    path = Path(expected.path)
    try:
        if path.suffix not in FILE_SUFFIXES:
            if path.suffix in _OTHER_SUFFIXES or path.is_file():
                raise _unknown_format(expected)
            return
        with open_regular(path) as file:
            read = _json_start if path.suffix == ".jsonl" else _parquet_start
            found, records = read(file, expected)
    except OSError as error:
        raise InvalidInput(
            f"cannot read {expected.path}: {error.strerror or error}",
            field=expected.field,
            hint="give a regular file that the job's program may read",
        ) from error
    for key, column in expected.columns:
        if found and column not in found:
            raise InvalidInput(
                f"{expected.path} has no column {column!r}; the data has the"
                f" column{'s' * (len(found) > 1)} {', '.join(found)}",
                field=key,
                hint=_remedy(key, column, expected.field),
            )
    if expected.check is not None:
        expected.check(records)


def _remedy(key: str, column: str, file: str) -> str:
    if key.endswith(".context"):
        return "name one of them in it"
    return f"rename a column to {column!r}" if key == file else f"set {key} to one of them"


def expected_prompts(
    field: str,
    path: str,
    data: DataConfig | OfflineData | CaptureData,
    *,
    answers: bool,
    learned: bool = False,
    more: Columns = (),
) -> Expected:
    """Return what a file of prompts must hold.

    `answers`: reference answers too. The reference of a conversation is its last message if that is
    the assistant's, so the column of answers may be missing. `learned`: answers that are learned or
    captured, which are always messages of a conversation. `more`: columns besides those of the
    prompt.
    """
    conversations = data.prompt_format.messages_column
    if conversations is None:
        columns: Columns = (("data.prompt_column", data.prompt_column),)
        columns += (("data.answer_column", data.answer_column),) if answers else ()
    else:
        columns = (("data.messages_column", conversations),)

    if (images := data.prompt_format.image_column) is not None:
        columns += (("data.image_column", images),)

    def check(records: Records) -> None:
        check_first_prompts(path, data, records, answers=answers, learned=learned)

    return Expected(field, path, columns + more, check)


def check_first_prompts(
    path: str,
    data: DataConfig | OfflineData | CaptureData,
    records: Records,
    *,
    answers: bool,
    learned: bool,
) -> None:
    """Raise InvalidInput if the first records are wrong: conversations, weights, images, answers.

    `records`: the first ones of the file `path`. A record without the column is not refused here.
    """
    answered = False
    form, weights = data.prompt_format, getattr(data, "weight_column", None)
    conversations = form.messages_column
    for number, record in enumerate(records, 1):
        where = f"row {number} of {path}"
        if weights is not None and weights in record:
            weight_of(record, weights, where)
        if form.image_column is not None and form.image_column in record:
            for image in images_of(record, form.image_column, where):
                if isinstance(image, str):
                    image_file(Path(path).parent, image, where)
        answered |= not learned and record.get(data.answer_column) is not None
        if conversations in record:
            found = form.conversation(record, where)
            answered |= (found.up_to_answer() if learned else found).is_answered
    if conversations is None or not records or answered:
        return
    if learned:
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


def _prompts(job: OnPolicyJob | RLJob | SFTJob, data: DataConfig) -> Iterator[Expected]:
    rewarded = isinstance(job, RLJob) and needs_reference(job.reward)
    learned = isinstance(job, SFTJob)
    taught = isinstance(job, OnPolicyJob) and bool(job.teachers)
    teacher: Columns = (("data.teacher_column", data.teacher_column),) if taught else ()
    if isinstance(job, OnPolicyJob):
        teacher += _of_context("teacher.context", job.teacher.context)
    elif isinstance(job, RLJob):
        teacher += _of_context("anchor.context", job.anchor.context)
    weight: Columns = ()
    if data.weight_column is not None:
        weight = (("data.weight_column", data.weight_column),)
    examined = job.eval.metric != "none"
    for field, path in data.training_paths:
        aside = field == "data.path" and data.eval_path is None
        answers = learned or rewarded or (examined and aside)
        yield expected_prompts(
            field, path, data, answers=answers, learned=learned, more=teacher + weight
        )
    if data.eval_path is not None:
        answers = learned or rewarded or examined
        field, path = "data.eval_path", data.eval_path
        yield expected_prompts(
            field, path, data.without_weights(), answers=answers, learned=learned, more=teacher
        )


def _of_context(key: str, context: str | None) -> Columns:
    return tuple((key, column) for column in columns_named(context or ""))


def _captured(job: CaptureJob) -> Expected:
    data, more = job.data, _of_context("teacher.context", job.teacher.context)
    text = (("data.text_column", data.text_column),)
    if data.form == "text":
        return Expected("data.path", data.path, text + more)
    # What is scored is chosen as what a fine-tuning job learns.
    return expected_prompts("data.path", data.path, data, answers=True, learned=True, more=more)


def _unknown_format(expected: Expected) -> InvalidInput:
    path = Path(expected.path)
    reader = _READERS.get(path.suffix)
    made = str(path.with_suffix(".jsonl"))
    call = f"import datasets as d; d.Dataset.{reader}({str(path)!r}).to_json({made!r})"
    return InvalidInput(
        f"{expected.path} is neither a .jsonl nor a .parquet file, the two formats that are read",
        field=expected.field,
        hint=f'convert it: python -c "{call}"' if reader else "convert it to one of them",
    )


def _json_start(file: BinaryIO, expected: Expected) -> tuple[list[str], Records]:
    """Return the columns of the first records, and these; both empty if the line is very long."""
    data = file.read(_MOST_BYTES)
    if b"\0" in data[:4096] or data.startswith(_PARQUET_MAGIC):
        raise InvalidInput(
            f"{expected.path} is a binary file, not JSON lines",
            field=expected.field,
            hint="write one JSON object in each line, in UTF-8; a Parquet file ends in .parquet",
        )
    lines = data.split(b"\n")
    whole = len(data) < _MOST_BYTES
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines if whole else lines[:-1], 1):
        record = record_in(line, f"{expected.path}:{number}", expected.field)
        if record is not None:
            records.append(record)
        if len(records) == _MOST_RECORDS:
            break
    if whole and not records:
        raise _empty(expected)
    return list(dict.fromkeys(column for record in records for column in record)), records


def _parquet_start(file: BinaryIO, expected: Expected) -> tuple[list[str], Records]:
    """Return the columns of the schema, and the first records; both empty without pyarrow.

    The records are read only if the job checks them.
    """
    if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
        raise _not_parquet(expected, "it does not start with PAR1")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return [], []
    file.seek(0)
    try:
        found = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise _not_parquet(expected, (str(error).splitlines() or ["no footer"])[0]) from error
    if not found.metadata.num_rows:
        raise _empty(expected)
    if expected.check is None:
        return list(found.schema_arrow.names), []
    try:
        groups = range(found.metadata.num_row_groups)
        filled = next(group for group in groups if found.metadata.row_group(group).num_rows)
        first = next(found.iter_batches(batch_size=_MOST_RECORDS, row_groups=[filled]))
    except (pyarrow.ArrowException, OSError) as error:
        raise _not_parquet(expected, (str(error).splitlines() or ["damaged"])[0]) from error
    return list(found.schema_arrow.names), first.to_pylist()


def _not_parquet(expected: Expected, why: str) -> InvalidInput:
    return InvalidInput(
        f"{expected.path} is not a Parquet file: {why.rstrip('.')}",
        field=expected.field,
        hint="write the file again; the name of a file of JSON lines ends in .jsonl",
    )


def _empty(expected: Expected) -> InvalidInput:
    return InvalidInput(
        f"{expected.path} has no records",
        field=expected.field,
        hint="give a file with at least one record",
    )
