"""Reads records and turns them into token sequences to score, in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.capture import CaptureData
from clients.data.answer_ids import answered_ids, completion_ids
from clients.data.prompt_format import (
    check_chat_template,
    template_text,
)
from clients.data.records import DataSet, text_of
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
        data, form, tokenizer = self._data, self._data.prompt_format, self._tokenizer
        check_chat_template(form, template_text(tokenizer.chat_template))
        for where, record in self._records(data.prompt_column, data.answer_column):
            asked = form.conversation(record, where)
            answer = text_of(record, data.answer_column, "data.answer_column", where)
            ids = form.ids(tokenizer, asked, where)
            _require_tokens(ids, where)
            yield ids, completion_ids(tokenizer, answer)

    def _conversations(self) -> Iterator[tuple[list[int], list[int]]]:
        form, tokenizer = self._data.prompt_format, self._tokenizer
        check_chat_template(form, template_text(tokenizer.chat_template))
        for where, record in self._records(*form.columns):
            ids, answer = answered_ids(form, tokenizer, form.conversation(record, where), where)
            if answer:
                _require_tokens(ids, where)
            yield ids, answer

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


def _require_tokens(prompt: list[int], where: str) -> None:
    if not prompt:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field="data.path",
            hint="give every record a prompt; a completion is scored given the tokens before it",
        )
