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

from clients.config.capture import CaptureData, CaptureJob
from clients.data.conversation import Conversation, with_context
from clients.data.images import digest_of, read_image, stored_images
from clients.data.records import images_of, text_of
from clients.data.template_parts import TemplateParts
from clients.data.tokens import loading
from clients.data.tokens.answers import answered_ids, completion_ids
from clients.data.tokens.lower_bound import tokens_by_length
from protos.errors import InternalFault, InvalidInput
from protos.operating_system import count_cores

# The location of a record in the data, for messages, and the record.
LocatedRecord = tuple[str, Mapping[str, Any]]

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_CHUNK_RECORDS = 512
# The number of chunks to tokenize before worker processes start; their start takes seconds.
_CHUNKS_BEFORE_PROCESSES = 8


@dataclass(frozen=True)
class EncodedRecords:
    """The token ids of consecutive records.

    - token_ids: int32 [n], the ids of all records, concatenated.
    - lengths: int32 [records], number of tokens; 0 for a record with nothing to score.
    - starts: int32 [records], number of tokens before the first scored token.
    - images: for each record, the images in the format of `stored_images`.
    - teacher_prompts: for each record, int32 [P], the prompt for the teacher in place of the tokens
      before `starts`; empty if student and teacher have the same prompt.
    - too_long: number of omitted records. They have so many characters that they are too long for
      any tokenization; the other fields do not contain them.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int32]
    images: tuple[bytes, ...]
    teacher_prompts: tuple[NDArray[np.int32], ...]
    too_long: int

    def records(self) -> Iterator[tuple[NDArray[np.int32], int, bytes, NDArray[np.int32]]]:
        """Yield (token ids, start, images, teacher prompt) of each record."""
        ends = np.cumsum(self.lengths)
        columns = zip(
            ends, self.lengths, self.starts, self.images, self.teacher_prompts, strict=True
        )
        for end, length, start, images, prompt in columns:
            yield self.token_ids[end - length : end], int(start), images, prompt


class _TooLongError(Exception):
    """A record has so many characters that it must have too many tokens. It is not tokenized."""


class RecordEncoder:
    """Encodes the records of a data set. It can be sent to another process."""

    def __init__(
        self, data: CaptureData, tokenizer: Any, max_tokens: int, context: str | None = None
    ) -> None:
        """`max_tokens` is the maximum number of tokens of a record; form `text` has no maximum.

        See `tokens_by_length`. `context` is text before the prompt that only the teacher reads.
        """
        self._data = data
        self._max_tokens = max_tokens
        self._context = context
        self._form = data.prompt_format
        self._tokenizer = tokenizer
        self._parts = TemplateParts(self._form, tokenizer)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read. An empty tuple means all columns, because a context may use any."""
        if self._context is not None:
            return ()
        match self._data.form:
            case "completion":
                return *self._form.columns, self._data.answer_column
            case "messages":
                return self._form.columns
            case "text":
                return (self._data.text_column,)

    def encode(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        """Return the token ids of records.

        A record of form `text` is one document, without an end token. Records that are too long
        are counted, and not tokenized. Raises InvalidInput for a record that does not fit the form.
        """
        encode_record: Callable[[str, Mapping[str, Any]], tuple[list[int], list[int]]]
        match self._data.form:
            case "completion":
                encode_record = self._encode_completion
            case "messages":
                encode_record = self._encode_conversation
            case "text":
                encode_record = self._encode_document
        ids: list[int] = []
        lengths, starts, images, teacher_prompts = [], [], [], []
        too_long = 0
        for location, record in records:
            try:
                prompt, scored = encode_record(location, record)
                teacher_prompt = self._encode_teacher_prompt(location, record)
            except _TooLongError:
                too_long += 1
                continue
            lengths.append(len(prompt) + len(scored) if scored else 0)
            starts.append(len(prompt))
            images.append(self._encode_images(location, record))
            teacher_prompts.append(np.array(teacher_prompt, np.int32))
            if scored:
                ids += prompt
                ids += scored
        token_ids, length_array, start_array = (
            np.array(integers, np.int32) for integers in (ids, lengths, starts)
        )
        return EncodedRecords(
            token_ids, length_array, start_array, tuple(images), tuple(teacher_prompts), too_long
        )

    def _require_length(self, conversation: Conversation, answer: str = "") -> None:
        """Raise _TooLongError if the record has so many characters that it must be too long."""
        if tokens_by_length(conversation.characters + len(answer), self._max_tokens):
            raise _TooLongError

    def _encode_completion(
        self, location: str, record: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        conversation = self._form.conversation(record, location)
        answer = text_of(record, self._data.answer_column, "data.answer_column", location)
        self._require_length(conversation, answer)
        self._parts.check(conversation, location)
        ids = self._form.ids(self._tokenizer, conversation, location)
        _require_tokens(ids, location)
        return ids, completion_ids(self._form, self._tokenizer, answer)

    def _encode_conversation(
        self, location: str, record: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        conversation = self._form.conversation(record, location).up_to_answer()
        self._require_length(conversation)
        self._parts.check(conversation, location)
        ids, answer = answered_ids(self._form, self._tokenizer, conversation, location)
        if answer:
            _require_tokens(ids, location)
        return ids, answer

    def _encode_teacher_prompt(self, location: str, record: Mapping[str, Any]) -> list[int]:
        """Return the ids of the prompt with the context; an empty list without a context."""
        if self._context is None:
            return []
        conversation = self._form.conversation(record, location)
        answer = conversation.answer
        if self._data.form == "completion":
            answer = text_of(record, self._data.answer_column, "data.answer_column", location)
        elif not (conversation := conversation.up_to_answer()).messages:
            return []
        columns = {**record, "prompt": self._form.text(record, conversation), "answer": answer}
        conversation = with_context(
            conversation.unanswered(), self._context, columns, "teacher.context"
        )
        self._require_length(conversation)
        return self._form.ids(self._tokenizer, conversation, location)

    def _encode_images(self, location: str, record: Mapping[str, Any]) -> bytes:
        """Return the names and digests of a record's images.

        Raises InvalidInput if an image is not a file.
        """
        column = self._data.image_column
        if column is None:
            return b""
        named_digests: list[tuple[str, str]] = []
        for name in images_of(record, column, location):
            if isinstance(name, bytes):
                raise InvalidInput(
                    f"{location} has the bytes of an image in column {column!r}, but a store"
                    f" holds only paths",
                    field="data.image_column",
                    hint="write each image to a file, and the path into the column",
                )
            named_digests.append(
                (name, digest_of(read_image(Path(self._data.path).parent / name, location)))
            )
        return stored_images(named_digests)

    def _encode_document(
        self, location: str, record: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        text = text_of(record, self._data.text_column, "data.text_column", location)
        return [], self._tokenizer(text)["input_ids"] if text else []


def load_tokenizer(job: CaptureJob) -> Any:
    """Return the tokenizer of a capture. Raises InvalidInput if it cannot be loaded."""
    import transformers

    candidates = {
        "data.tokenizer": (job.data.tokenizer, None),
        "student.model": (job.student.model, job.student.revision) if job.student else ("", None),
        "teacher.model": (job.teacher.model, None),
    }
    for field, (name, revision) in candidates.items():
        if not name:
            continue
        try:
            return loading.load_tokenizer(transformers, name, revision)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"cannot load the tokenizer of {name}: {' '.join(str(error).split())[:300]}",
                field=field,
                hint="give a Hugging Face directory or hub id with a tokenizer",
            ) from error
    raise InvalidInput(
        "no tokenizer is given",
        field="data.tokenizer",
        hint="set the key to the teacher's tokenizer: a Hugging Face directory or a hub id",
    )


def encode_records(
    records: Iterator[LocatedRecord], encoder: RecordEncoder, processes: int | None = None
) -> Iterator[EncodedRecords]:
    """Yield the token ids of all records in order, in groups of some hundred records.

    `processes` is the number of processes for data sets with thousands of records; default: one per
    core of this process. The memory does not grow with the number of records.

    Raises the error of `encode` for the first invalid record, and InternalFault if a process is
    killed.
    """
    count = processes or count_cores()
    chunks = iter(lambda: list(islice(records, _CHUNK_RECORDS)), [])
    for chunk in chunks if count == 1 else islice(chunks, _CHUNKS_BEFORE_PROCESSES):
        yield encoder.encode(chunk)
    next_chunk = next(chunks, None)
    if next_chunk is not None:
        yield from _encode_in_processes(chain([next_chunk], chunks), encoder, count)


def _encode_in_processes(
    chunks: Iterator[list[LocatedRecord]], encoder: RecordEncoder, count: int
) -> Iterator[EncodedRecords]:
    pending_chunks: deque[Future[EncodedRecords]] = deque()
    # A fork of a process with threads, or with a GPU, may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, context, initializer=_start_worker, initargs=(encoder, os.getpid())
    )
    try:
        for chunk in chunks:
            pending_chunks.append(pool.submit(_encode_chunk, chunk))
            if len(pending_chunks) > 2 * count:
                yield pending_chunks.popleft().result()
        while pending_chunks:
            yield pending_chunks.popleft().result()
    except BrokenProcessPool as error:
        raise InternalFault(
            "a process that tokenizes was killed",
            hint="check that the machine has enough memory, then resume the job",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: RecordEncoder  # of a worker process


def _start_worker(encoder: RecordEncoder, parent: int) -> None:
    """Initialise a worker process, which ignores SIGTERM: the parent process handles SIGTERM."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was killed before prctl
        os._exit(1)


def _encode_chunk(chunk: list[LocatedRecord]) -> EncodedRecords:
    return _encoder.encode(chunk)


def _require_tokens(prompt: list[int], location: str) -> None:
    if not prompt:
        raise InvalidInput(
            f"the prompt of {location} has no tokens",
            field="data.path",
            hint="give every record a prompt; a completion is scored given the tokens before it",
        )
