"""Reads records and turns them into token sequences to score, in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.capture import CaptureData
from clients.data.prompt_format import check_chat_template, template_text, warn_of_date
from clients.data.records import DataSet
from protos.errors import InvalidInput
from teacher_service.capture.tokenizing import LocatedRecord, RecordEncoder, encode_records


@dataclass(frozen=True, eq=False)
class CaptureSequence:
    """A sequence of tokens, int32 [T]; positions from `start` (>= 1) on are scored.

    - images: the images of the prompt, in the format of `stored_images`; each image has one
      placeholder in the tokens.
    - teacher_prompt: int32 [P], the prompt for the teacher in place of the tokens before `start`;
      empty if student and teacher have the same prompt.
    """

    token_ids: NDArray[np.int32]
    start: int
    images: bytes = b""
    teacher_prompt: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def rows(self) -> int:
        """Number of scored positions, T - start."""
        return len(self.token_ids) - self.start

    @property
    def teacher_input(self) -> tuple[NDArray[np.int32], int]:
        """The token ids that the teacher reads, and the position of the first scored token."""
        prompt = self.teacher_prompt
        if not len(prompt):
            return self.token_ids, self.start
        return np.concatenate([prompt, self.token_ids[self.start :]]), len(prompt)


class SequenceReader:
    """An iterable of the sequences of a data set; iterate only once.

    Three counters grow during the iteration:

    - records: number of records read.
    - too_long: number of sequences that were skipped because they have more than `max_tokens`
      tokens.
    - empty: number of records that were skipped because they have nothing to score.
    """

    def __init__(
        self,
        data: CaptureData,
        tokenizer: Any,
        max_tokens: int,
        processes: int | None = None,
        context: str | None = None,
    ) -> None:
        """`processes` is the number of processes that tokenize; None: one per core of this process.

        Only the teacher reads the text `context`.
        """
        self._encoder = RecordEncoder(data, tokenizer, max_tokens, context)
        self._data = data
        self._source = DataSet(data.path, data.name, data.split)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._processes = processes
        self.records = 0
        self.too_long = 0
        self.empty = 0

    def __iter__(self) -> Iterator[CaptureSequence]:
        """Yield the sequences. Raises InvalidInput at a record that does not fit `data.form`."""
        if self._data.form == "text":
            yield from self._pack_documents()
            return
        template = template_text(self._tokenizer.chat_template)
        check_chat_template(self._data.prompt_format, template)
        warn_of_date(self._data.prompt_format, template)
        yield from self.read(self.located_records())

    def read(self, records: Iterator[LocatedRecord]) -> Iterator[CaptureSequence]:
        """Yield the sequences of these records, and count the omitted records."""
        for ids, start, images, prompt in self._encode_records(records):
            sequence = CaptureSequence(ids, start, images, prompt)
            if not len(ids):
                self.empty += 1
            elif max(len(ids), len(sequence.teacher_input[0])) > self._max_tokens:
                self.too_long += 1
            else:
                yield sequence

    def _encode_records(
        self, records: Iterator[LocatedRecord]
    ) -> Iterator[tuple[NDArray[np.int32], int, bytes, NDArray[np.int32]]]:
        for chunk in encode_records(records, self._encoder, self._processes):
            self.records += len(chunk.lengths) + chunk.too_long
            self.too_long += chunk.too_long
            yield from chunk.records()

    def located_records(self) -> Iterator[LocatedRecord]:
        """Yield the records of the data set before encoding, with their places for messages."""
        yield from self._source.rows(self._encoder.columns)

    def _pack_documents(self) -> Iterator[CaptureSequence]:
        """Join the documents, each with an end token, and yield pieces of `max_tokens` tokens."""
        end_id = self._tokenizer.eos_token_id
        if end_id is None:
            raise InvalidInput(
                "the tokenizer has no end-of-text token to put between documents",
                field="data.form",
                hint="use another tokenizer, or another form",
            )
        buffered_ids = np.empty(0, np.int32)
        for ids, *_ in self._encode_records(self.located_records()):
            self.empty += not len(ids)
            # Some tokenizers start texts with the end token, so no document is cut at an end token.
            has_end_token = not len(ids) or ids[-1] == end_id
            buffered_ids = np.concatenate(
                [buffered_ids, ids, np.array([] if has_end_token else [end_id], np.int32)]
            )
            while len(buffered_ids) >= self._max_tokens:
                yield CaptureSequence(buffered_ids[: self._max_tokens], 1)
                buffered_ids = buffered_ids[self._max_tokens :]
        if len(buffered_ids) > 1:
            yield CaptureSequence(buffered_ids, 1)
