"""Recognises the columns of prompts and answers from the first records of a data set.

Data sets have conventional columns: `messages`, `conversations` (ShareGPT), `prompt` and
`completion` (TRL), `instruction`, `input` and `output` (Alpaca). A `Reading` is one way to convert
records to prompts. Records with several readings are ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.data.conversation import messages_in, text_of_content

# Keys of the table `data` whose values a reading chooses.
COLUMN_KEYS = (
    "prompt_column",
    "input_column",
    "messages_column",
    "completion_column",
    "answer_column",
)
# The keys that choose the prompt: if one is set, nothing is recognised.
PROMPT_KEYS = COLUMN_KEYS[:-1]
_CONVERSATIONS = ("messages", "conversations", "conversation")
_ANSWERS = ("answer", "completion")
# Columns with parts of a prompt that no reading includes.
_OMITTED = ("system", "history")
_SAMPLE_CHARS = 40


@dataclass(frozen=True)
class Reading:
    """One way to convert records to prompts.

    - name: the name of the layout.
    - columns: the column for each key of the table `data` that the layout determines.
    - sample: the start of the first prompt.
    - omitted: columns that may belong to the prompt but are not read.
    """

    name: str
    columns: Mapping[str, str]
    sample: str
    omitted: tuple[str, ...] = ()

    @property
    def is_conversation(self) -> bool:
        """Whether the prompts are lists of messages."""
        return "messages_column" in self.columns

    @property
    def keys(self) -> str:
        """The lines of a job file that choose this reading, such as `data.prompt_column = "q"`."""
        return ", ".join(f'data.{key} = "{column}"' for key, column in self.columns.items())

    @property
    def description(self) -> str:
        """The name of the layout, and the columns that are not read."""
        return f"{self.name}{'; not read: ' * bool(self.omitted)}{', '.join(self.omitted)}"

    def without(self, keys: Collection[str]) -> Reading:
        """Return the reading without the columns for `keys`, the keys that the job sets itself."""
        columns = {key: column for key, column in self.columns.items() if key not in keys}
        return replace(self, columns=columns)


def readings_of(
    columns: Collection[str], records: Sequence[Mapping[str, Any]], *, answers: bool
) -> list[Reading]:
    """Return all readings of the records. The list is empty if the columns are not conventional.

    `columns`: the columns of the data set. `answers`: whether the job reads answers. If it does,
    two columns with answers give two readings.
    """
    readings = [
        *_read_conversations(columns, records),
        *_read_prompts(columns, records, answers=answers),
        *_read_instructions(columns, records),
    ]
    omitted = tuple(name for name in _OMITTED if name in columns)
    return [replace(reading, omitted=omitted) for reading in readings]


def _read_conversations(
    columns: Collection[str], records: Sequence[Mapping[str, Any]]
) -> Iterator[Reading]:
    for column in _CONVERSATIONS:
        messages = _first_messages(records, column) if column in columns else None
        if messages is not None:
            raw = _first_value(records, column)
            is_share_gpt = any("from" in message for message in raw)
            name = "conversations (ShareGPT)" if is_share_gpt else "conversations"
            yield Reading(name, {"messages_column": column}, _sample(messages))


def _read_prompts(
    columns: Collection[str], records: Sequence[Mapping[str, Any]], *, answers: bool
) -> Iterator[Reading]:
    if "prompt" not in columns:
        return
    messages = _first_messages(records, "prompt")
    if messages is not None:
        has_completion = _first_messages(records, "completion") is not None
        completion = {"completion_column": "completion"} if has_completion else {}
        name = "prompt and completion as messages (TRL)" if completion else "prompts as messages"
        yield Reading(name, {"messages_column": "prompt", **completion}, _sample(messages))
        return
    prompt = {"prompt_column": "prompt"}
    sample = str(_first_value(records, "prompt"))[:_SAMPLE_CHARS]
    answer_columns = [name for name in _ANSWERS if name in columns]
    for column in answer_columns if answers else answer_columns[:1]:
        name = f"prompt and {column}{' (TRL)' if column == 'completion' else ''}"
        yield Reading(name, {**prompt, "answer_column": column}, sample)
    if not answer_columns:
        yield Reading("prompts", prompt, sample)


def _read_instructions(
    columns: Collection[str], records: Sequence[Mapping[str, Any]]
) -> Iterator[Reading]:
    if "instruction" not in columns or not {"input", "output"} & {*columns}:
        return
    column_by_key = {
        "prompt_column": "instruction",
        "input_column": "input",
        "answer_column": "output",
    }
    yield Reading(
        "instruction, input and output (Alpaca)",
        {key: column for key, column in column_by_key.items() if column in columns},
        str(_first_value(records, "instruction"))[:_SAMPLE_CHARS],
    )


def _first_value(records: Sequence[Mapping[str, Any]], column: str) -> Any:
    return next((record[column] for record in records if record.get(column) is not None), None)


def _first_messages(
    records: Sequence[Mapping[str, Any]], column: str
) -> Sequence[Mapping[str, Any]] | None:
    """Return the messages of the first record with a value in the column; None if there is no such
    value, or it is not a list of messages.
    """
    value = _first_value(records, column)
    return messages_in(value) or None


def _sample(messages: Sequence[Mapping[str, Any]]) -> str:
    return text_of_content(messages[0].get("content"))[:_SAMPLE_CHARS]
