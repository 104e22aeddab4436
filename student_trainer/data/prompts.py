"""The prompts of a job: training and held-out prompts, and the prompts of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.common import DataConfig
from clients.data.records import DataSet, text_of
from clients.data.tokenization import prompt_ids
from protos.errors import InvalidInput
from student_trainer.data.order import Order, permutation


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
class PromptSet:
    """Prompts in an order fixed by the seed; each epoch has another permutation."""

    prompts: list[Prompt]
    seed: int

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """Return the `count` prompts of `step` (from 1), independent of earlier calls."""
        order = Order(len(self.prompts), self.seed)
        return [self.prompts[index] for index in order.of_step(step, count)]


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    held_out: int,
    max_tokens: int,
    seed: int,
    teachers: Collection[str] = (),
    with_fields: bool = False,
) -> tuple[PromptSet, list[Prompt], int]:
    """Return the training prompts, the held-out prompts, and how many prompts were too long.

    Prompts of more than `max_tokens` tokens are left out; the number counts those of `data.path`.
    `held_out` prompts come from `data.eval_path` if it is set, otherwise out of `data.path`.
    `with_fields`: keep all columns of the records.

    Raises InvalidInput if a file or column is missing, a prompt has no tokens, no prompt is left,
    or a prompt names a teacher that is not in `teachers` (checked if `teachers` is not empty).
    """

    def encoded(path: str, field: str) -> tuple[list[Prompt], int]:
        return _encode(path, field, data, tokenizer, max_tokens, teachers, with_fields)

    everything, too_long = encoded(data.path, "data.path")
    order = permutation(len(everything), seed, -1)
    if data.eval_path is not None:
        others, _ = encoded(data.eval_path, "data.eval_path")
        aside = [others[i] for i in permutation(len(others), seed, -1)[:held_out]]
        training = everything
    else:
        aside = [everything[i] for i in order[:held_out]]
        training = [everything[i] for i in order[held_out:]]
    for field, found in (
        ("data.eval_path" if data.eval_path else "data.path", aside),
        ("data.path", training),
    ):
        if not found:
            raise InvalidInput(
                f"no prompt of at most {max_tokens} tokens is left",
                field=field,
                hint="add data, lower eval.prompts, or raise method.max_prompt_tokens",
            )
    return PromptSet(training, seed), aside, too_long


def _encode(
    path: str,
    field: str,
    data: DataConfig,
    tokenizer: Any,
    max_tokens: int,
    teachers: Collection[str],
    with_fields: bool,
) -> tuple[list[Prompt], int]:
    prompts = []
    too_long = 0
    source = DataSet(path, data.name, data.split, field)
    columns = [data.prompt_column, data.answer_column]
    if teachers:
        columns.append(data.teacher_column)
    for number, record in enumerate(source.records([] if with_fields else columns), 1):
        where = f"row {number} of {path}"
        text = text_of(record, data.prompt_column, "data.prompt_column", where)
        ids = prompt_ids(tokenizer, data.template.replace("{prompt}", text))
        if not ids:
            raise InvalidInput(
                f"the prompt of {where} has no tokens",
                field=field,
                hint="remove the row, or give it a prompt: the model needs at least one token",
            )
        answer = ""
        if record.get(data.answer_column) is not None:
            answer = text_of(record, data.answer_column, "data.answer_column", where)
        teacher = _teacher(record, data.teacher_column, teachers, where) if teachers else ""
        if len(ids) > max_tokens:
            too_long += 1
        else:
            fields = record if with_fields else {}
            prompts.append(Prompt(np.array(ids, dtype=np.int32), answer, teacher, text, fields))
    return prompts, too_long


def _teacher(record: Mapping[str, Any], column: str, teachers: Collection[str], where: str) -> str:
    name = text_of(record, column, "data.teacher_column", where)
    if name not in teachers:
        raise InvalidInput(
            f"{where} names the teacher {name!r}; the job has {', '.join(sorted(teachers))}",
            field="data.teacher_column",
            hint="add the teacher's address to [teachers], or correct the data",
        )
    return name
