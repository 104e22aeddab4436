"""What is asked: prompts of a data set, or of a reward's own task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clients.config.common import DataConfig
from clients.config.exam import ExamConfig
from clients.data.records import DataSet, text_of
from protos.errors import InvalidInput
from student_trainer.rewards.reasoning_gym import Task, TaskQuestions

_GENERATED = 200  # prompts of a task, where nobody says how many
_NEED_NO_REFERENCE = ("python", "regex")


@dataclass(frozen=True)
class Question:
    """number: of the record in its data, or of the prompt in its task; text: with its template."""

    number: int
    text: str
    reference: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def load_questions(config: ExamConfig) -> list[Question]:
    """Raises InvalidInput for data that cannot be read or has no references."""
    if config.reward.task is not None:
        template = config.reward.template
        task = Task(config.reward.task, config.reward.options)
        asked = TaskQuestions(task, config.seed, config.prompts or _GENERATED).held_out
        return [
            Question(number, template.replace("{prompt}", one.text), one.answer, one.fields)
            for number, one in enumerate(asked)
        ]
    assert config.data is not None, "the command asks for it"
    records = list(_records(config.data, needed=config.reward.type not in _NEED_NO_REFERENCE))
    if not records:
        raise InvalidInput(f"{config.data.path} has no prompts", field="--data")
    order = np.random.default_rng(config.seed).permutation(len(records))
    return [records[index] for index in sorted(order[: config.prompts])]


def fingerprint(config: ExamConfig) -> str:
    """Another one for other prompts."""
    if config.data is None:
        return f"{config.reward.type} {sorted(config.reward.options.items())}"
    data = config.data
    return DataSet(data.path, data.name, data.split, "--data").fingerprint()


def _records(data: DataConfig, *, needed: bool) -> Iterator[Question]:
    source = DataSet(data.path, data.name, data.split, "--data")
    for number, record in enumerate(source.records([])):
        where = f"row {number + 1} of {data.path}"
        text = text_of(record, data.prompt_column, "--prompt-column", where)
        reference = ""
        if needed or record.get(data.answer_column) is not None:
            reference = text_of(record, data.answer_column, "--answer-column", where)
        yield Question(number, data.template.replace("{prompt}", text), reference, record)
