"""The prompts of a job: training and held-out prompts, and the prompts of each step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.common import DataConfig
from clients.data.records import DataSet, text_of
from clients.data.tokenization import prompt_ids
from protos.errors import InvalidInput
from student_trainer.data.order import permutation

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that the student completes.

    ids [T] int32: its token ids. answer: the reference answer, "" if there is none. teacher: the
    name of its teacher, "" if the job has one. text: the prompt before the template, for rewards.
    fields: the columns of its record, for rewards.
    """

    ids: NDArray[np.int32]
    answer: str
    teacher: str = ""
    text: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class _Record:
    """A row of the data before tokenization. where: the row, for messages."""

    text: str
    answer: str
    teacher: str
    fields: Mapping[str, Any]
    where: str


class _Encoder:
    """Turns records into prompts, and counts those that are too long."""

    def __init__(self, tokenizer: Any, template: str, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_tokens = max_tokens
        self._too_long = 0

    def is_blank(self, record: _Record) -> bool:
        """Return whether the prompt may have no tokens."""
        return not self._text(record).strip()

    def encode(self, record: _Record, field: str) -> Prompt | None:
        """Return the prompt of a record; None if it is too long.

        Raises InvalidInput, naming `field`, if the prompt has no tokens.
        """
        ids = prompt_ids(self._tokenizer, self._text(record))
        if not ids:
            raise InvalidInput(
                f"the prompt of {record.where} has no tokens",
                field=field,
                hint="remove the row, or give it a prompt: the model needs at least one token",
            )
        if len(ids) > self._max_tokens:
            self._too_long += 1
            if self._too_long & (self._too_long - 1) == 0:  # 1, 2, 4, 8, ...
                log.warning(
                    "left out %d prompts so far that are longer than method.max_prompt_tokens = %d",
                    self._too_long,
                    self._max_tokens,
                )
            return None
        tokens = np.array(ids, dtype=np.int32)
        return Prompt(tokens, record.answer, record.teacher, record.text, record.fields)

    def _text(self, record: _Record) -> str:
        return self._template.replace("{prompt}", record.text)


class PromptSet:
    """Prompts in an order fixed by the seed; each epoch has another permutation.

    A prompt is tokenized when a step first needs it. Prompts that turn out to be too long are left
    out of every epoch, and the prompts after them move up.
    """

    def __init__(
        self, records: Sequence[_Record], encode: Callable[[_Record], Prompt | None], seed: int
    ) -> None:
        """`encode`: returns the prompt of a record, None if it is too long."""
        self._records = records
        self._encode = encode
        self._seed = seed
        self._prompts: dict[int, Prompt | None] = {}  # by the index of the record
        self._next = 0
        self._stream = self._prompts_from(0)

    @property
    def is_empty(self) -> bool:
        """Return whether no prompt is short enough. Tokenizes until one is found."""
        order = permutation(len(self._records), self._seed, 0)
        return all(self._prompt(int(index)) is None for index in order)

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """Return the `count` prompts of `step` (from 1), independent of earlier calls.

        Tokenizes the prompts of all earlier steps too, because some may be too long.
        """
        first = (step - 1) * count
        if first != self._next:
            self._stream = self._prompts_from(first)
        self._next = first + count
        return list(islice(self._stream, count))

    def _prompts_from(self, first: int) -> Iterator[Prompt]:
        """Yield the prompts of all epochs without the `first` ones; the set must not be empty."""
        for epoch in count_up():
            if len(self._prompts) == len(self._records):
                fitting = sum(prompt is not None for prompt in self._prompts.values())
                if first >= fitting:
                    first -= fitting
                    continue
            for index in permutation(len(self._records), self._seed, epoch):
                prompt = self._prompt(int(index))
                if prompt is None:
                    continue
                if first:
                    first -= 1
                else:
                    yield prompt

    def _prompt(self, index: int) -> Prompt | None:
        if index not in self._prompts:
            self._prompts[index] = self._encode(self._records[index])
        return self._prompts[index]


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    held_out: int,
    max_tokens: int,
    seed: int,
    teachers: Collection[str] = (),
    with_fields: bool = False,
) -> tuple[PromptSet, list[Prompt]]:
    """Return the training prompts and the held-out prompts.

    Reads all records and tokenizes the held-out prompts. Prompts of more than `max_tokens` tokens
    are left out, and counted in the log as they are met. `held_out` prompts come from
    `data.eval_path` if it is set, otherwise out of `data.path`. `with_fields`: keep all columns of
    the records.

    Raises InvalidInput if a file or column is missing, a prompt has no tokens, no prompt is left,
    or a prompt names a teacher that is not in `teachers` (checked if `teachers` is not empty).
    """
    encoder = _Encoder(tokenizer, data.template, max_tokens)

    def records(path: str, field: str) -> list[_Record]:
        found = list(_records(path, field, data, teachers, with_fields))
        for record in filter(encoder.is_blank, found):
            encoder.encode(record, field)  # may raise, and must do so before the first step
        return found

    field = "data.eval_path" if data.eval_path else "data.path"
    chosen = records(data.path, "data.path")
    others = records(data.eval_path, field) if data.eval_path else chosen
    mixed = [others[index] for index in permutation(len(others), seed, -1)]
    aside: list[Prompt] = []
    tried = 0
    while tried < len(mixed) and len(aside) < held_out:
        prompt = encoder.encode(mixed[tried], field)
        aside += [] if prompt is None else [prompt]
        tried += 1
    if data.eval_path is None:
        chosen = mixed[tried:]
    training = PromptSet(chosen, lambda record: encoder.encode(record, "data.path"), seed)
    for name, empty in ((field, not aside), ("data.path", training.is_empty)):
        if empty:
            raise InvalidInput(
                f"no prompt of at most {max_tokens} tokens is left",
                field=name,
                hint="add data, lower eval.prompts, or raise method.max_prompt_tokens",
            )
    return training, aside


def _records(
    path: str, field: str, data: DataConfig, teachers: Collection[str], with_fields: bool
) -> Iterator[_Record]:
    source = DataSet(path, data.name, data.split, field)
    columns = [data.prompt_column, data.answer_column]
    if teachers:
        columns.append(data.teacher_column)
    for number, record in enumerate(source.records([] if with_fields else columns), 1):
        where = f"row {number} of {path}"
        text = text_of(record, data.prompt_column, "data.prompt_column", where)
        answer = ""
        if record.get(data.answer_column) is not None:
            answer = text_of(record, data.answer_column, "data.answer_column", where)
        teacher = _teacher(record, data.teacher_column, teachers, where) if teachers else ""
        yield _Record(text, answer, teacher, record if with_fields else {}, where)


def _teacher(record: Mapping[str, Any], column: str, teachers: Collection[str], where: str) -> str:
    name = text_of(record, column, "data.teacher_column", where)
    if name not in teachers:
        raise InvalidInput(
            f"{where} names the teacher {name!r}; the job has {', '.join(sorted(teachers))}",
            field="data.teacher_column",
            hint="add the teacher's address to [teachers], or correct the data",
        )
    return name
