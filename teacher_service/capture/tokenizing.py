"""Turns records into token ids, in several processes if there are many records."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.config.capture import CaptureData
from clients.data.answer_ids import answered_ids, completion_ids
from clients.data.conversation import with_context
from clients.data.images import digest_of, read_image, stored_images
from clients.data.records import images_of, text_of
from protos.errors import InternalFault, InvalidInput

# A record with its place in the data, for messages.
Placed = tuple[str, Mapping[str, Any]]

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_CHUNK_RECORDS = 512
# So many records are tokenized before processes start, which takes seconds.
_CHUNKS_BEFORE_PROCESSES = 8


@dataclass(frozen=True)
class Encoded:
    """The token ids of consecutive records.

    token_ids int32 [n]: of all records, one after the other. lengths, starts int32 [records]: a
    record's number of tokens, and of those before its first scored one. A record with nothing to
    score has length 0. images: of each record, as `stored_images` writes them. teacher_prompts: of
    each record, int32 [P], what the teacher reads in place of the tokens before `starts`; [0]:
    those.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int32]
    images: tuple[bytes, ...]
    teacher_prompts: tuple[NDArray[np.int32], ...]

    def records(self) -> Iterator[tuple[NDArray[np.int32], int, bytes, NDArray[np.int32]]]:
        """Yield (token ids, start, images, teacher prompt) of each record."""
        ends = np.cumsum(self.lengths)
        columns = zip(
            ends, self.lengths, self.starts, self.images, self.teacher_prompts, strict=True
        )
        for end, length, start, images, prompt in columns:
            yield self.token_ids[end - length : end], int(start), images, prompt


class RecordEncoder:
    """Encodes the records of a data set. It can be sent to another process."""

    def __init__(self, data: CaptureData, tokenizer: Any, context: str | None = None) -> None:
        """`context`: text that only the teacher reads, before the prompt."""
        self._data = data
        self._context = context
        self._form = data.prompt_format
        self._tokenizer = tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the records need; none: all of them, for the context."""
        if self._context is not None:
            return ()
        match self._data.form:
            case "completion":
                return *self._form.columns, self._data.answer_column
            case "messages":
                return self._form.columns
            case "text":
                return (self._data.text_column,)

    def encode(self, records: Sequence[Placed]) -> Encoded:
        """Return the token ids of records. Raises InvalidInput at one that does not fit the form.

        A record of form `text` is one document, without an end token.
        """
        of_record: Callable[[str, Mapping[str, Any]], tuple[list[int], list[int]]]
        match self._data.form:
            case "completion":
                of_record = self._completion
            case "messages":
                of_record = self._conversation
            case "text":
                of_record = self._document
        ids: list[int] = []
        lengths, starts, images, others = [], [], [], []
        for where, record in records:
            prompt, scored = of_record(where, record)
            lengths.append(len(prompt) + len(scored) if scored else 0)
            starts.append(len(prompt))
            images.append(self._images(where, record))
            others.append(np.array(self._teacher_prompt(where, record), np.int32))
            if scored:
                ids += prompt
                ids += scored
        found, sizes, firsts = (np.array(numbers, np.int32) for numbers in (ids, lengths, starts))
        return Encoded(found, sizes, firsts, tuple(images), tuple(others))

    def _completion(self, where: str, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        asked = self._form.conversation(record, where)
        answer = text_of(record, self._data.answer_column, "data.answer_column", where)
        ids = self._form.ids(self._tokenizer, asked, where)
        _require_tokens(ids, where)
        return ids, completion_ids(self._tokenizer, answer)

    def _conversation(self, where: str, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        conversation = self._form.conversation(record, where)
        ids, answer = answered_ids(self._form, self._tokenizer, conversation, where)
        if answer:
            _require_tokens(ids, where)
        return ids, answer

    def _teacher_prompt(self, where: str, record: Mapping[str, Any]) -> list[int]:
        """Return the ids of the prompt with the context; none without a context."""
        if self._context is None:
            return []
        asked = self._form.conversation(record, where)
        answer = asked.answer
        if self._data.form == "completion":
            answer = text_of(record, self._data.answer_column, "data.answer_column", where)
        elif not (asked := asked.up_to_answer()).messages:
            return []
        columns = {**record, "prompt": self._form.text(record, asked), "answer": answer}
        asked = with_context(asked.unanswered(), self._context, columns, "teacher.context")
        return self._form.ids(self._tokenizer, asked, where)

    def _images(self, where: str, record: Mapping[str, Any]) -> bytes:
        """Return the names and digests of a record's images. Raises InvalidInput without a file."""
        column = self._data.image_column
        if column is None:
            return b""
        found: list[tuple[str, str]] = []
        for name in images_of(record, column, where):
            if isinstance(name, bytes):
                raise InvalidInput(
                    f"{where} has an image itself in column {column!r}, which a store cannot name",
                    field="data.image_column",
                    hint="write each image to a file, and its path into the column",
                )
            found.append((name, digest_of(read_image(Path(self._data.path).parent / name, where))))
        return stored_images(found)

    def _document(self, where: str, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        text = text_of(record, self._data.text_column, "data.text_column", where)
        return [], self._tokenizer(text)["input_ids"] if text else []


def encode_all(
    records: Iterator[Placed], encoder: RecordEncoder, processes: int | None = None
) -> Iterator[Encoded]:
    """Yield the token ids of all records, in their order, some hundred records at a time.

    `processes`: how many tokenize once there are thousands of records; default: one a core of this
    process. The memory does not grow with the number of records.

    Raises what `encode` raises at the first such record, and InternalFault if a process is killed.
    """
    count = processes or len(os.sched_getaffinity(0))
    chunks = iter(lambda: list(islice(records, _CHUNK_RECORDS)), [])
    for chunk in chunks if count == 1 else islice(chunks, _CHUNKS_BEFORE_PROCESSES):
        yield encoder.encode(chunk)
    following = next(chunks, None)
    if following is not None:
        yield from _in_processes(chain([following], chunks), encoder, count)


def _in_processes(
    chunks: Iterator[list[Placed]], encoder: RecordEncoder, count: int
) -> Iterator[Encoded]:
    waiting: deque[Future[Encoded]] = deque()
    # A fork of a process with threads, or with a GPU, may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_take, initargs=(encoder, os.getpid()))
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode, chunk))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InternalFault(
            "a process that tokenizes was killed",
            hint="check that the machine has enough memory, then resume the job",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: RecordEncoder  # of a process that tokenizes


def _take(encoder: RecordEncoder, parent: int) -> None:
    """Begin a process that tokenizes. SIGTERM, which its group gets, is for the parent alone."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def _encode(chunk: list[Placed]) -> Encoded:
    return _encoder.encode(chunk)


def _require_tokens(prompt: list[int], where: str) -> None:
    if not prompt:
        raise InvalidInput(
            f"the prompt of {where} has no tokens",
            field="data.path",
            hint="give every record a prompt; a completion is scored given the tokens before it",
        )
