"""The prompts of a job: read once, held-out ones apart, each step's a pure function of the step."""

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
    """Token ids int32 [T] given to the student, the reference answer ("" if there is none), the
    name of its teacher ("" if there is only one), and what a reward may read: the prompt's own text
    and the columns of its record.
    """

    ids: NDArray[np.int32]
    answer: str
    teacher: str = ""
    text: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """Prompts in an order that a seed decides; every epoch has another one."""

    prompts: list[Prompt]
    seed: int

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of optimizer step `step` (from 1), whatever ran before."""
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
    """(training prompts, held-out prompts, how many were left out for being too long).

    Held-out prompts come from `data.eval_path`, or are taken out of the training data.
    `with_fields`: each with all columns of its record. Raises InvalidInput for a missing file, a
    missing column, too little data, or, where `teachers` are named, a prompt of another one.
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
                hint="give more data, fewer eval.prompts, or a larger method.max_prompt_tokens",
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
                hint="every answer must have something to follow",
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
            f"{where} wants the teacher {name!r}; the job has {', '.join(sorted(teachers))}",
            field="data.teacher_column",
            hint="give it an address under [teachers], or correct the data",
        )
    return name
