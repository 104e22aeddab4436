"""Recognises the columns that a job does not set, from the first records of its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError

from clients.config.capture import CaptureData
from clients.config.evaluation import ExamConfig
from clients.config.file import replaced
from clients.config.problems import describe
from clients.config.tables.common import Table
from clients.config.tables.data import DataFile, PromptKeys
from clients.data.formats import START_RECORDS, files_of, read_start
from clients.data.layouts import PROMPT_KEYS, Reading, readings_of
from clients.data.object_urls import is_object_url
from clients.data.records import DataSet
from protos.errors import DistillError, InvalidInput

_Job = TypeVar("_Job", bound=Table)

log = logging.getLogger(__name__)


def fit_columns(
    job: _Job, data_files: Sequence[DataFile], *, remote: bool = False
) -> tuple[dict[str, str], str]:
    """Return values for the column keys that a job does not set, and the name of the layout.

    - job: a job, or an evaluation.
    - remote: whether to read data sets of the hub and directories too.

    The values are column names by key, without values that equal their defaults. They are empty if
    the job sets the column of its prompts, or if the columns are not conventional.

    Raises InvalidInput if the records can be read in several ways, if the data sets of the job have
    different layouts, or if another key of the job does not suit the layout.
    """
    data = getattr(job, "data", None)
    if not isinstance(data, PromptKeys) or data.model_fields_set & {*PROMPT_KEYS}:
        return {}, ""
    if getattr(data, "form", None) == "text":
        return {}, ""
    first_choice: tuple[DataFile, Reading] | None = None
    columns: dict[str, str] = {}
    for data_file in data_files:
        reading = _choose_reading(data, data_file, remote=remote)
        if reading is None:
            continue
        first_file, first_reading = first_choice = first_choice or (data_file, reading)
        is_other = reading.is_conversation != first_reading.is_conversation or any(
            columns.get(key, column) != column for key, column in reading.columns.items()
        )
        if is_other:
            raise InvalidInput(
                f"{data_file.path} has {reading.name}, but {first_file.path} has"
                f" {first_reading.name}",
                field=data_file.field,
                hint="give all data sets of the job the same columns",
            )
        columns |= reading.columns
    if first_choice is None:
        return {}, ""
    reading = first_choice[1]
    if isinstance(data, CaptureData) and "form" not in data.model_fields_set:
        columns["form"] = "messages" if reading.is_conversation else "completion"
    values = {
        f"data.{key}": column
        for key, column in columns.items()
        if column != type(data).model_fields[key].default
    }
    if values:
        _check_keys(job, values)
    return values, reading.description


def with_columns(exam: ExamConfig) -> ExamConfig:
    """Return an evaluation with values for the column keys that it does not set.

    The values are those of `fit_columns`.
    """
    columns, layout = fit_columns(exam, exam.data_files, remote=True)
    for key, column in columns.items():
        exam = replaced(exam, key, column)
    if columns:
        log.info("values that the evaluation does not set: %s (%s)", columns, layout)
    return exam


def _choose_reading(data: PromptKeys, data_file: DataFile, *, remote: bool) -> Reading | None:
    """Return the reading of a data set; None if it cannot be read here, or has no known columns.

    Raises InvalidInput if there are several readings. `remote`: see `fit_columns`.
    """
    if data_file.prompts is None:
        return None
    try:
        columns, records = _read_start(data, data_file, remote=remote)
    except (DistillError, OSError):  # other checks report it
        return None
    readings: dict[tuple[tuple[str, str], ...], Reading] = {}
    for reading in readings_of(columns, records, answers=data_file.answers):
        if _suits_form(data, reading):
            unused = set() if data_file.answers else {"answer_column"}
            unset = reading.without(data.model_fields_set | unused)
            readings.setdefault(tuple(unset.columns.items()), unset)
    if len(readings) <= 1:
        return next(iter(readings.values()), None)
    descriptions = [
        f"{reading.name} (the first is {reading.sample!r})" for reading in readings.values()
    ]
    raise InvalidInput(
        f"{data_file.path} can be read in {len(readings)} ways: as {', or as '.join(descriptions)}",
        field=data_file.field,
        hint=f"set {', or '.join(reading.keys for reading in readings.values())}",
    )


def _suits_form(data: PromptKeys, reading: Reading) -> bool:
    """Return whether a reading has the form that a capture sets with the key `data.form`.

    The result is True if the job does not set this key.
    """
    if not isinstance(data, CaptureData) or "form" not in data.model_fields_set:
        return True
    return reading.is_conversation == (data.form == "messages")


def _read_start(
    data: PromptKeys, data_file: DataFile, *, remote: bool
) -> tuple[list[str], list[Mapping[str, Any]]]:
    if is_object_url(data_file.path):
        return [], []
    if files := files_of(data_file.path, data_file.field):
        return read_start(files[0], data_file.field)
    if not remote:
        return [], []
    mix = getattr(data, "mix", ())
    owner = mix[int(data_file.field.split(".")[2])] if "mix" in data_file.field else data
    source = DataSet(data_file.path, getattr(owner, "name", None), getattr(owner, "split", "train"))
    records = list(islice(source.records([]), START_RECORDS))
    return list(dict.fromkeys(name for record in records for name in record)), records


def _check_keys(job: Table, values: Mapping[str, str]) -> None:
    """Raise InvalidInput if another key of the job is wrong, or has no effect, with new columns.

    `values`: the new columns by key.
    """
    for key, value in values.items():
        job = replaced(job, key, value)
    try:
        type(job).model_validate(job.model_dump(exclude_unset=True))
    except ValidationError as error:
        path, message = next(iter(describe(error.errors(include_url=False)[0], type(job))))
        read_as = ", ".join(f"{key} = {value}" for key, value in values.items())
        raise InvalidInput(
            f"{message} (the data is read with {read_as})", field=".".join(path)
        ) from None
