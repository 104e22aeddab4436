"""Chooses the limits and columns that a job does not set, to fit its models and its data.

A limit is a key such as `method.max_prompt_tokens` or `eval.prompts`. Its default is for large
models and data. If the job does not set the limit, the default is reduced to the context of the
student and of the teachers, or to a tenth of the records. `columns.py` recognises the columns of
the data.

The result depends only on the job, the config.json of the student, the teachers' infos and the
first records, so preflight, preview and training compute the same values. An attempt writes the
values to the run directory, and attempts that continue its work read them there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clients.config.file import replaced
from clients.config.tables.common import Table
from clients.config.tables.data import DataConfig
from clients.config.tables.job import JobConfig, TrainingJob
from clients.data.models.shape import context_of
from clients.data.object_urls import is_object_url
from clients.data.outside import read_document
from clients.data.records import DataSet
from clients.preflight.columns import fit_columns
from clients.runs.directory import RunDirectory, replace_file
from clients.store.dataset import LogitDataset
from protos.errors import DistillError, InvalidInput, Unavailable

LIMITS_FILE = "limits.json"
# The share of the records that an evaluation, or a step, takes by default.
_SHARE = 10
# With more records than this, every limit keeps its default value.
_MAX_RECORDS = 128 * _SHARE
PROMPT, ANSWER, SEQUENCE = "max_prompt_tokens", "max_new_tokens", "max_tokens"

_Job = TypeVar("_Job", bound=JobConfig)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Values for keys that a job does not set.

    - values: the value of each key; often empty.
    - reasons: the reason for the value of a key. If several columns were recognised, the last
      column has the reason for all columns.
    """

    values: Mapping[str, int | str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for people; "" without values."""
        return "; ".join(
            f"{key} = {value}" + (f" ({self.reasons[key]})" if key in self.reasons else "")
            for key, value in self.values.items()
        )

    def apply(self, config: _Job) -> _Job:
        """Return the job with these values. Keys that the job sets keep their values."""
        for key, value in self.values.items():
            if not is_set(config, key):
                config = replaced(config, key, value)
        return config


NO_LIMITS = Limits()


def is_set(config: JobConfig, key: str) -> bool:
    """Return whether the job sets `key`, such as `eval.prompts`; False if `key` has its default."""
    table_name, _, name = key.rpartition(".")
    if not table_name:  # max_steps, which is 0 in a job with `epochs`
        return bool(getattr(config, name))
    return name in getattr(config, table_name).model_fields_set


def fit_limits(
    config: JobConfig, teachers: Mapping[str, int] | None = None, *, remote: bool = False
) -> Limits:
    """Return values for columns and limits that the job does not set.

    A key has a value here only if its default does not fit the models and the data of the job.

    - teachers: maximum number of tokens that each teacher reads, by label, as far as known.
    - remote: whether to read models and data of the hub too.

    Models and data that cannot be read are ignored, because other checks report them. Raises
    InvalidInput as `fit_columns` does.
    """
    values: dict[str, int | str] = {}
    reasons: dict[str, str] = {}
    columns, layout = fit_columns(config, config.data_files, remote=remote)
    if columns:
        values |= columns
        reasons[[*columns][-1]] = layout
        config = Limits(columns).apply(config)
    contexts = {**_read_contexts(config, remote=remote), **(teachers or {})}
    if contexts:
        reader = min(contexts, key=lambda name: contexts[name])
        lengths = _fit_lengths(config, contexts[reader])
        values |= lengths
        reasons |= dict.fromkeys(lengths, f"the {reader} reads {contexts[reader]} tokens")
    if isinstance(config, TrainingJob) and (count := _count_records(config, remote=remote)):
        counts = _fit_counts(config, count)
        values |= counts
        reasons |= dict.fromkeys(counts, f"the data has {count} records")
    return Limits(values, reasons)


def read_limits(run: Path) -> Limits | None:
    """Return the limits that an attempt wrote to its run directory; None without a valid file."""
    try:
        return Limits(**read_document(run / LIMITS_FILE))
    except (OSError, ValueError, TypeError):
        return None


def resumed_limits(config: JobConfig, run: Path) -> Limits | None:
    """Return the limits that the next attempt of a run reuses; None if it must compute new limits.

    A training job reuses the limits only if the run has a checkpoint. If the run has checkpoints
    but no file of limits, an earlier version that wrote no such file has started it. The result is
    then NO_LIMITS, so every key that the job does not set has its default. Other jobs reuse the
    limits whenever the file exists.
    """
    if not isinstance(config, TrainingJob):
        return read_limits(run)
    has_checkpoints = bool(RunDirectory(run).checkpoint_steps())
    return (read_limits(run) or NO_LIMITS) if has_checkpoints else None


def write_limits(run: Path, limits: Limits) -> None:
    """Log the limits, and write them to the run directory for later attempts."""
    replace_file(run / LIMITS_FILE, json.dumps(vars(limits)) + "\n")
    if limits.values:
        log.info("values that the job does not set: %s", limits)


def add_limit(run: Path, key: str, value: int, reason: str) -> None:
    """Log a limit that depends on the data of the job, and add it to the limits of the run."""
    limits, added = read_limits(run) or NO_LIMITS, Limits({key: value}, {key: reason})
    merged = Limits({**limits.values, key: value}, {**limits.reasons, key: reason})
    replace_file(run / LIMITS_FILE, json.dumps(vars(merged)) + "\n")
    log.info("%s", added)


def check_lengths(config: JobConfig, reader: str, context: int | None) -> None:
    """Raise InvalidInput if a sequence of the job can be longer than a model can read.

    - reader: the name of the model, for the message.
    - context: the maximum number of tokens that the model reads; None means no limit.

    The error names the keys that shorten a sequence, and the largest values that fit.
    """
    keys = _length_keys(config)
    sizes = {key: int(_value(config, key)) for key in keys}
    total = sum(sizes.values())
    search, answer = config.search, sizes.get(f"method.{ANSWER}", 0)
    if search is not None and search.max_passage_tokens >= answer:
        raise InvalidInput(
            f"the passages of a query leave no room in an answer of {answer} tokens",
            field="environment.max_passage_tokens",
            hint=f"set environment.max_passage_tokens to at most {answer // 2}",
        )
    if context is None or total <= context:
        return
    remedies = []
    for key, size in sizes.items():
        room = context - (total - size)
        others = [other for other in keys if other != key]
        if others and not is_set(config, others[0]):  # the other key is fitted
            room = context - min(sizes[others[0]], context // 2)
        if room > 0 and room < size:
            remedies.append(f"{key} to at most {room}")
    if not remedies:
        half = context // 2
        remedies = [" and ".join(f"{key} to at most {half}" for key in keys)]
    raise InvalidInput(
        f"a sequence can have {total} tokens"
        f" ({' + '.join(f'{key} = {size}' for key, size in sizes.items())}), but the {reader} reads"
        f" at most {context}",
        field=remedies[0].split()[0],
        hint=f"set {', or '.join(remedies)}",
    )


def check_room(longest: int, answer: int, reader: str, context: int | None, remedy: str) -> None:
    """Raise InvalidInput if a prompt with an answer is longer than a model can read.

    - longest: tokens of the prompt.
    - answer: tokens of the answer.
    - reader, context: see `check_lengths`.
    - remedy: the hint to shorten the prompt; this function appends the maximum number of tokens.
    """
    if context is None or longest + answer <= context:
        return
    raise InvalidInput(
        f"a prompt of {longest} tokens with an answer of {answer} is longer than the {context}"
        f" tokens that the {reader} reads",
        field=f"method.{ANSWER}",
        hint=f"set method.{ANSWER} to at most {context - longest}"
        if longest < context
        else f"{remedy} {max(context - answer, context // 2)}",
    )


def _value(config: JobConfig, key: str) -> Any:
    table_name, _, name = key.partition(".")
    return getattr(getattr(config, table_name), name)


def _length_keys(config: JobConfig) -> tuple[str, ...]:
    """Return the keys whose values add up to the maximum number of tokens of a sequence."""
    method: Table | None = getattr(config, "method", None)
    fields = type(method).model_fields if method else {}
    if PROMPT in fields:
        return f"method.{PROMPT}", f"method.{ANSWER}"
    if SEQUENCE in fields:
        is_answered = isinstance(config, TrainingJob) and config.is_evaluated
        return (f"method.{SEQUENCE}", *([f"method.{ANSWER}"] if is_answered else []))
    return ()


def _fit_lengths(config: JobConfig, context: int) -> dict[str, int]:
    """Return values for token limits that the job does not set. A sequence then fits `context`."""
    answer_key = f"method.{ANSWER}"
    if config.stores:
        longest = longest_stored(config) if config.answers_stored_prompts else None
        return {} if longest is None else _shrink(config, {answer_key: context - longest})
    keys = _length_keys(config)
    if not keys:  # an evaluation, whose prompts, of any length, take the other half
        return _shrink(config, {answer_key: context // 2})
    if len(keys) == 1:
        return _shrink(config, {keys[0]: context})
    prompt_key, answer_key = keys
    prompt, answer = int(_value(config, prompt_key)), int(_value(config, answer_key))
    if not is_set(config, answer_key):
        is_fixed = is_set(config, prompt_key)
        answer = min(answer, context - prompt if is_fixed else max(context // 2, context - prompt))
    values = {prompt_key: context - answer, answer_key: answer}
    if config.search is not None and config.search.max_passage_tokens >= answer:
        values["environment.max_passage_tokens"] = answer // 2
    return _shrink(config, values)


def _fit_counts(config: TrainingJob, records: int) -> dict[str, int]:
    """Return values for numbers of records that the job does not set: a tenth of `records`.

    A number is at least one per process. For `train.prompts_per_step`, it is at least one per
    process and update.
    """
    share = max(records // _SHARE, config.processes)
    updates: int = getattr(getattr(config, "method", None), "updates_per_step", 1)
    data = getattr(config, "data", None)
    values = {}
    if getattr(data, "eval_path", None) is None:
        values["eval.prompts"] = share
    if not getattr(data, "mix", ()):
        values["train.prompts_per_step"] = max(share, config.processes * updates)
    return _shrink(config, values)


def _shrink(config: JobConfig, values: Mapping[str, int]) -> dict[str, int]:
    """Return the entries of `values` that are below their default and that the job does not set."""
    return {
        key: value
        for key, value in values.items()
        if 0 < value < int(_value(config, key)) and not is_set(config, key)
    }


def _read_contexts(config: JobConfig, *, remote: bool) -> dict[str, int]:
    """Return the maximum number of tokens that the job's models read, by "student" or "teacher".

    A model whose limit is unknown is missing, such as the model of a teacher on another machine.
    Raises Unavailable if the student's config.json is on a hub that does not answer.
    """
    models: dict[str, tuple[str, str | None]] = {}
    student = config.answering_student
    if student is not None:
        models["student"] = student.model, getattr(student, "revision", None)
    if config.teacher_link is not None and config.teacher_link.model is not None:
        models["teacher"] = config.teacher_link.model, None
    contexts: dict[str, int | None] = {}
    for reader, (model, revision) in models.items():
        if remote or Path(model).is_dir():
            with suppress(*([Unavailable] if reader == "teacher" else [])):
                contexts[reader] = context_of(model, revision)
    return {reader: context for reader, context in contexts.items() if context is not None}


def _count_records(config: JobConfig, *, remote: bool) -> int:
    """Return the number of training records, at most _MAX_RECORDS; 0 if the number is unknown."""
    data, store = getattr(config, "data", None), config.stores.get("data.path")
    try:
        if store is not None:
            return 0 if is_object_url(store) else len(LogitDataset(store))
        if not isinstance(data, DataConfig) or not (remote or Path(data.path).is_file()):
            return 0
        data_set = DataSet(data.path, data.name, data.split)
        return data_set.count(data.prompt_format.columns, _MAX_RECORDS)
    except (DistillError, OSError):
        return 0


def longest_stored(job: JobConfig) -> int | None:
    """Return the number of tokens of the longest sequence in the job's store.

    Returns None if the job has no store, or if the store cannot be read. A store at a URL is not
    read, because the job's program copies it.
    """
    path = job.stores.get("data.path")
    if path is None or is_object_url(path):
        return None
    try:
        return int(LogitDataset(path).lengths.max(initial=0))
    except (DistillError, OSError):
        return None
