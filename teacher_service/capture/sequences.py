"""Reads records and turns them into token sequences to score, in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.capture import CaptureData
from clients.data.records import DataSet, text_of
from clients.data.tokenization import plain_ids, prompt_ids, rendered
from protos.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class CaptureSequence:
    """A sequence of tokens, int32 [T]; positions from `start` (>= 1) on are scored."""

    token_ids: NDArray[np.int32]
    start: int

    @property
    def rows(self) -> int:
        """Number of scored positions, T - start."""
        return len(self.token_ids) - self.start


class SequenceReader:
    """An iterable of the sequences of a data set; iterate over it once.

    Two counters grow while iterating: `too_long`, the sequences left out because they have more
    than `max_tokens` tokens, and `empty`, the records left out because they have nothing to score.
    """

    def __init__(self, data: CaptureData, tokenizer: Any, max_tokens: int) -> None:
        self._data = data
        self._source = DataSet(data.path, data.name, data.split)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.too_long = 0
        self.empty = 0

    def __iter__(self) -> Iterator[CaptureSequence]:
        """Yield the sequences. Raises InvalidInput at a record that does not fit `data.form`."""
        match self._data.form:
            case "completion":
                pairs = self._completions()
            case "messages":
                pairs = self._conversations()
            case "text":
                yield from self._packed()
                return
        for prompt, completion in pairs:
            if not completion:
                self.empty += 1
            elif len(prompt) + len(completion) > self._max_tokens:
                self.too_long += 1
            else:
                yield CaptureSequence(np.array(prompt + completion, np.int32), len(prompt))

    def _records(self, *columns: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, record in enumerate(self._source.records(columns), 1):
            yield f"row {number} of {self._data.path}", record

    def _completions(self) -> Iterator[tuple[list[int], list[int]]]:
        data, tokenizer = self._data, self._tokenizer
        for where, record in self._records(data.prompt_column, data.answer_column):
            prompt = text_of(record, data.prompt_column, "data.prompt_column", where)
            answer = text_of(record, data.answer_column, "data.answer_column", where)
            ids = prompt_ids(tokenizer, data.template.replace("{prompt}", prompt))
            _require_tokens(ids, where)
            yield ids, _ended(plain_ids(tokenizer, answer), tokenizer) if answer else []

    def _conversations(self) -> Iterator[tuple[list[int], list[int]]]:
        tokenizer, column = self._tokenizer, self._data.messages_column
        if not tokenizer.chat_template:
            raise InvalidInput(
                "the tokenizer has no chat template, which the form messages needs",
                field="data.form",
                hint="use the tokenizer of an instruct model, or another form",
            )
        for where, record in self._records(column):
            turns = _turns(record, column, where)
            if not turns:
                yield [], []
                continue
            prompt = rendered(tokenizer, turns[:-1], add_generation_prompt=True)
            whole = rendered(tokenizer, turns, add_generation_prompt=False)
            if not whole.startswith(prompt):
                raise InvalidInput(
                    f"the chat template changes the prompt of {where} once its answer is added",
                    field="data.form",
                    hint="put prompt and answer into two columns, and use the form completion",
                )
            ids = plain_ids(tokenizer, prompt)
            _require_tokens(ids, where)
            yield ids, _ended(plain_ids(tokenizer, whole.removeprefix(prompt)), tokenizer)

    def _packed(self) -> Iterator[CaptureSequence]:
        """Yield pieces of `max_tokens` tokens of the joined documents, each with an end token."""
        tokenizer, column = self._tokenizer, self._data.text_column
        end = tokenizer.eos_token_id
        if end is None:
            raise InvalidInput(
                "the tokenizer has no end-of-text token to put between documents",
                field="data.form",
                hint="use another tokenizer, or another form",
            )
        waiting: list[int] = []
        for where, record in self._records(column):
            text = text_of(record, column, "data.text_column", where)
            self.empty += not text
            ids: list[int] = tokenizer(text)["input_ids"] if text else []
            # Some tokenizers start texts with the end token, so a document is never cut at one.
            waiting += ids if ids[-1:] in ([], [end]) else [*ids, end]
            while len(waiting) >= self._max_tokens:
                yield CaptureSequence(np.array(waiting[: self._max_tokens], np.int32), 1)
                del waiting[: self._max_tokens]
        if len(waiting) > 1:
            yield CaptureSequence(np.array(waiting, np.int32), 1)


def _turns(record: Mapping[str, Any], column: str, where: str) -> list[Mapping[str, str]]:
    """Return the conversation up to its last assistant turn; empty if there is no such turn."""
    turns = record.get(column)
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        raise InvalidInput(
            f"{where} has no list of messages in column {column!r}; its columns are"
            f" {', '.join(record)}",
            field="data.messages_column",
            hint='each message must be like {"role": "user", "content": "..."}',
        )
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn["content"], str):
            raise InvalidInput(
                f"message {number} of {where} has no text: its content is {_kind(turn)}",
                field="data.messages_column",
                hint="remove such messages, or write their content as one string",
            )
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    return turns


def _require_tokens(prompt: list[int], where: str) -> None:
    if not prompt:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field="data.path",
            hint="give every record a prompt; a completion is scored given the tokens before it",
        )


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn


def _kind(turn: Mapping[str, Any]) -> str:
    content = turn["content"]
    return "null" if content is None else f"a {type(content).__name__}"


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Return `ids` up to the first end token; append one if there is none."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids
    return ids[: ids.index(end) + 1] if end in ids else [*ids, end]
