"""Reads the stored rows of a teacher with another tokenizer, as sequences of the student.

A store contains token ids of the teacher. The student reads its own encoding of the stored prompt
and answer. The stored log-probs of the answer's tokens are divided among the student's tokens, for
the losses of `cross_tokenizer/losses.py`. For `mapped_kl`, the head ids of the rows at which a word
begins are also converted to ids of the student. Other rows contribute only the log-prob of their
token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from clients.config.offline import OfflineJob
from clients.cross_tokenizer.alignment import Aligner, Alignment
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.data.records import DataSet
from clients.store.dataset import LogitDataset
from clients.store.record_cache import open_records
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows
from student_trainer.cross_tokenizer.comparison import (
    find_end_token,
    find_special_token_pair,
    load_known_tokenizer,
    to_byte_tokenizer,
)
from student_trainer.cross_tokenizer.losses import Unit
from student_trainer.cross_tokenizer.special_token_store import (
    SpecialTokenStore,
    unknown_prompt_error,
)
from student_trainer.cross_tokenizer.stored_text import StoredText, leading_special_tokens
from student_trainer.data.captured_stores import Stores
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses.rows import LOWEST_LOGPROB
from student_trainer.model.loading import vocabulary
from student_trainer.teachers.source import PendingRows, resolved

log = logging.getLogger(__name__)

Ids = NDArray[np.int32]
_FIELD = "data.tokenizer"
_SPACES = np.frombuffer(b" \t\n\r", np.uint8)
# How stored rows are matched with the student's tokens; see `method.match`.
Match = Literal["row", "chunk", "word"]


class StoredPrompts:
    """Converts stored prompts from the teacher's ids to the student's ids."""

    def __init__(
        self,
        teacher: ByteTokenizer,
        tokenizer: Any,
        prompt_format: PromptFormat,
        known_prompts: Mapping[bytes, Ids],
    ) -> None:
        """Set up the conversion.

        - teacher: the teacher's tokenizer.
        - tokenizer: the student's tokenizer.
        - prompt_format: the format of the student's prompts.
        - known_prompts: the student's ids of each known prompt; the key is the bytes of the
          teacher's ids. If it is empty, prompts are plain text.
        """
        self._teacher = teacher
        self._tokenizer = tokenizer
        # A stored prompt already contains its template.
        self._prompt_format = replace(prompt_format, template="{prompt}")
        self._known_prompts = known_prompts

    def __call__(self, ids: Ids) -> Ids | None:
        """Return the student's ids [P] of a stored prompt; None if they are not known.

        - If `known_prompts` is not empty, only the ids of these prompts are known.
        - Otherwise, only the ids of plain text are known. A prompt with a chat template has special
          tokens after the start of its text, so its ids are not known.
        """
        if self._known_prompts:
            return self._known_prompts.get(ids.tobytes())
        text_positions = np.flatnonzero(self._teacher.lengths[ids])
        if not len(text_positions) or not self._teacher.lengths[ids[text_positions[0] :]].all():
            return None
        text = self._teacher.data(ids).decode("utf-8", "replace")
        conversation = self._prompt_format.conversation_of_text(text)
        return np.array(self._prompt_format.ids(self._tokenizer, conversation), np.int32)


@dataclass(frozen=True)
class TokenMap:
    """A map from the teacher's ids to tokens of the student.

    - first [V] int32: for each teacher id, the first token of the student's encoding of its bytes.
      An end token of the teacher has the student's end token. Other special tokens have -1.
    - begins [V] bool: True for ids that begin a word. These start with white space, or are end
      tokens.
    """

    aligner: Aligner
    first: Ids
    begins: NDArray[np.bool_]

    @classmethod
    def build(cls, aligner: Aligner, ends: Ids) -> TokenMap:
        """Build the map by encoding every teacher token with the student's tokenizer.

        This takes about a second for 100,000 ids. The aligner's writer is the teacher, its reader
        the student. `ends`: the teacher's ids that end an answer.
        """
        teacher, student = aligner.writer, aligner.reader
        first = np.full(len(teacher.lengths), -1, np.int32)
        begins = np.zeros(len(first), np.bool_)
        for token_id in np.flatnonzero(teacher.lengths):
            token_bytes = teacher.data(np.array([token_id]))
            ids = student.encode(token_bytes.decode("utf-8", "surrogateescape"))
            first[token_id] = ids[0] if len(ids) else -1
            begins[token_id] = token_bytes[0] in _SPACES
        first[ends], begins[ends] = aligner.reader_end, True
        return cls(aligner, first, begins)


class CrossTokenizerStore:
    """Reads stored sequences of a teacher as sequences of student tokens with AlignedRows."""

    def __init__(
        self,
        aligner: Aligner,
        prompts: StoredPrompts,
        ends: Ids,
        match: Match,
        longest: int | None,
        begins: tuple[Ids, Ids] | None = None,
    ) -> None:
        """Set up the reader.

        - aligner: aligns the tokens; its writer is the teacher, its reader the student.
        - prompts: converts stored prompts to the student's ids.
        - ends: the teacher's ids that end an answer.
        - match: `method.match` of the job.
        - longest: maximum number of tokens that the student reads; longer sequences are left out.
          None means no limit.
        - begins: for a store of packed text, the special tokens of student and teacher before a
          document; otherwise None.
        """
        self._aligner = aligner
        self._prompts = prompts
        self._ends = ends
        self._match = match
        self._longest = longest
        self._map = TokenMap.build(aligner, ends) if match == "row" else None
        self._text = begins and StoredText(aligner, ends, *begins, self._match_rows, longest)

    @property
    def tokens(self) -> int:
        """Number of ids of the student's tokenizer. The student model may have more logits."""
        return len(self._aligner.reader.lengths)

    def check_prompts(self, data: LogitDataset, label: str) -> None:
        """Raise InvalidInput if the student's ids of a stored prompt are not known."""
        for index in range(0 if self._text else len(data)):
            if self._prompts(data.prompt_ids(index)) is None:
                raise unknown_prompt_error(index, label)

    def read(self, data: LogitDataset, index: int) -> PendingRows:
        """Read stored sequence `index`. Its rows are available at once, so nothing waits for them.

        A sequence that cannot be aligned, or is too long, is replaced by two tokens that are not
        learned. Packed text that is too long is truncated. Raises Corrupt if the bytes of the
        sequence are damaged.
        """
        entry, block = data.decoded(index)
        ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int32)
        if self._text:
            line = self._text.read(ids, block)
            if line is None:
                end = np.int32(self._aligner.reader_end)
                return _pending_rows(np.array([end, end]), 1, self._skipped_row(block))
            return _pending_rows(line[0], 1, line[1])
        prompt_ids, answer = self._prompts(ids[: entry.start]), ids[entry.start :]
        assert prompt_ids is not None, "check_prompts accepts only known prompts"
        answer, ended = self._read_answer(answer)
        alignment = self._aligner.align(answer, has_end=ended)
        if alignment is None or self._is_too_long(len(prompt_ids) + len(alignment.reader_ids)):
            return _pending_rows(
                np.array([prompt_ids[0], prompt_ids[0]]), 1, self._skipped_row(block)
            )
        rows = self._match_rows(alignment, answer, block.slice(0, len(answer)))
        return _pending_rows(
            np.concatenate([prompt_ids, alignment.reader_ids]), len(prompt_ids), rows
        )

    def _read_answer(self, ids: Ids) -> tuple[Ids, bool]:
        """Return the ids of an answer up to its end token, and True if it has an end token."""
        special = np.flatnonzero(self._aligner.writer.lengths[ids] == 0)
        if len(special) and ids[special[0]] in self._ends:
            return ids[: special[0] + 1], True
        return ids, False

    def _match_rows(self, alignment: Alignment, ids: Ids, block: RowBlock) -> AlignedRows:
        if self._match == "row":
            assert self._map is not None, "method.match = row has a map"
            return mapped_rows(alignment, ids, block, self._map)
        return unit_rows(alignment, block.token_logprobs, self._match)

    def _skipped_row(self, block: RowBlock) -> AlignedRows:
        return _skipped_row(block.k if self._map is not None else 0)

    def _is_too_long(self, tokens: int) -> bool:
        return self._longest is not None and tokens > self._longest


def unit_rows(alignment: Alignment, logprobs: NDArray[np.float32], unit: Unit) -> AlignedRows:
    """Return the rows [T] of an answer's student tokens.

    - alignment: its writer tokens are the teacher's, its reader tokens the student's.
    - logprobs [n]: the log-probs of the answer's teacher tokens.
    - unit: whether a unit is a word or a chunk.

    The first student token of a unit gets the sum of the log-probs of the unit. A unit is not
    learned if one of its tokens is not settled, which means that later bytes could change the
    token.
    """
    writer_units, reader_units = alignment.chunk, alignment.reader_chunk
    if unit == "word":
        writer_units, reader_units = alignment.word, alignment.reader_word
    count = int(reader_units.max()) + 1
    unit_logprobs = np.bincount(
        writer_units[alignment.read], logprobs[alignment.read], minlength=count
    )
    open_units = np.bincount(reader_units, ~alignment.reader_settled, minlength=count) > 0
    first = np.append(True, reader_units[1:] != reader_units[:-1])
    learned = ~open_units[reader_units]
    shares = np.where(first & learned, unit_logprobs[reader_units], 0.0)
    return _build_rows(shares, np.cumsum(first) - 1, learned, alignment.reader_one_to_one)


def mapped_rows(alignment: Alignment, ids: Ids, block: RowBlock, tokens: TokenMap) -> AlignedRows:
    """Return the rows [T] of an answer's student tokens, with the weights of `mapped_kl`.

    - alignment: its writer tokens are the teacher's, its reader tokens the student's.
    - ids [n]: the teacher's tokens of the answer.
    - block: the n rows of these tokens.
    - tokens: the map from the teacher's ids to the student's.

    In the result, `tail_sample_ids` are the head ids of `block` as ids of the student.
    """
    rows = unit_rows(alignment, block.token_logprobs, "chunk")
    assert block.head_ids is not None, "stored rows have head ids"
    data = np.frombuffer(alignment.data, np.uint8)
    starts = _first_positions(tokens.aligner.writer.lengths[ids[alignment.read]])
    reader_starts = _first_positions(tokens.aligner.reader.lengths[alignment.reader_ids])
    writer_rows = np.minimum(np.searchsorted(starts, reader_starts), len(starts) - 1)
    row_starts = starts[writer_rows]
    # A word begins after a byte that is not white space, and at the beginning of the text, before
    # which 0 stands for a byte that is not white space.
    preceding_bytes = np.append(data, np.uint8(0))[row_starts - 1]
    follows_space = np.isin(preceding_bytes, _SPACES)
    heads = block.head_ids[writer_rows]
    head_logprobs = np.maximum(block.head_logprobs[writer_rows].astype(np.float64), LOWEST_LOGPROB)
    is_mappable = tokens.begins[heads] | (row_starts == 0)[:, None]
    is_mappable &= (tokens.first[heads] >= 0) & ((row_starts == reader_starts) & ~follows_space)[
        :, None
    ]
    is_own_token = is_mappable & (heads == ids[writer_rows][:, None])
    is_used = is_own_token.any(1)[:, None] & is_mappable
    probabilities = np.where(is_used, np.exp(head_logprobs), 0.0)
    weights = (
        probabilities / np.maximum(probabilities.sum(1), np.finfo(np.float64).tiny)[:, None]
        - is_own_token
    )
    weights = np.where(is_used, weights, 0.0)
    mapped_cost = (weights * head_logprobs).sum(1)
    return replace(
        rows,
        token_logprobs=(rows.token_logprobs + mapped_cost).astype(np.float32),
        tail_sample_ids=np.where(is_used, tokens.first[heads], 0).astype(np.int32),
        weights=weights.astype(np.float32),
    )


def _first_positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def open_cross_tokenizer_store(
    config: OfflineJob, stores: Stores, student_tokenizer: Any, longest: int | None
) -> CrossTokenizerStore | SpecialTokenStore | None:
    """Return the reader of stores that another tokenizer wrote.

    None if the store has the student's tokenizer, or if the job requires this. `longest`: maximum
    number of tokens that the student reads.

    Raises InvalidInput or WrongState, with the job key, if:

    - the tokenizer of the store does not exist,
    - the given tokenizer is not the tokenizer of the store,
    - the tokenizer cannot be aligned, or
    - a prompt is unknown.
    """
    tokenizer_key, store = config.data.tokenizer, stores.training
    fingerprint = store.facts["tokenizer_fingerprint"]
    if (
        tokenizer_key == "same"
        or tokenizer_fingerprint(vocabulary(student_tokenizer)) == fingerprint
    ):
        _refuse_match(config, f"the {store.label} has the student's tokenizer")
        return None
    name = store.facts.get("tokenizer", "") if tokenizer_key == "auto" else tokenizer_key
    teacher_tokenizer = load_known_tokenizer(name, fingerprint, store.label, _FIELD)
    pair = find_special_token_pair(
        config.data.roles, student_tokenizer, teacher_tokenizer, "data.roles"
    )
    is_text = store.facts.get("form") == "text"
    prompts = StoredPrompts(
        to_byte_tokenizer(teacher_tokenizer, "store", _FIELD),
        student_tokenizer,
        config.data.prompt_format,
        _map_prompts(config, student_tokenizer, teacher_tokenizer),
    )
    if pair is not None:
        _refuse_match(config, f"student and {store.label} differ in special tokens only")
        ids = pair.ids(int(store.facts["vocab_size"]))
        role_store = SpecialTokenStore(ids, pair.tokens, None if is_text else prompts)
        for opened_store in (store, stores.held_out):
            if opened_store is not None:
                role_store.check(opened_store.data, opened_store.label, longest)
        return role_store
    aligner = Aligner(
        to_byte_tokenizer(teacher_tokenizer, "store", _FIELD),
        to_byte_tokenizer(student_tokenizer, "student", "student.model"),
        find_end_token(student_tokenizer, "student", "student.model"),
    )
    ends = {find_end_token(teacher_tokenizer, "store", _FIELD), teacher_tokenizer.eos_token_id} - {
        None
    }
    begins = (
        leading_special_tokens(student_tokenizer, aligner.reader.lengths),
        leading_special_tokens(teacher_tokenizer, aligner.writer.lengths),
    )
    reader = CrossTokenizerStore(
        aligner,
        prompts,
        np.array(sorted(ends), np.int32),
        config.method.match,
        longest,
        begins if is_text else None,
    )
    for opened_store in (store, stores.held_out):
        if opened_store is not None:
            reader.check_prompts(opened_store.data, opened_store.label)
    log.info("the %s has another tokenizer: method.match = %s", store.label, config.method.match)
    return reader


def _refuse_match(config: OfflineJob, reason: str) -> None:
    if config.method.match != "row":
        raise InvalidInput(
            f"has no effect: {reason}, so no alignment is needed",
            field="method.match",
            hint="remove the key",
        )


def _map_prompts(
    config: OfflineJob, student_tokenizer: Any, teacher_tokenizer: Any
) -> dict[bytes, Ids]:
    """Return the student's ids of each prompt of `data.prompts`.

    The key is the bytes of the teacher's ids of the prompt.
    """
    if config.data.prompts is None:
        return {}
    prompt_format = config.data.prompt_format
    for tokenizer in (student_tokenizer, teacher_tokenizer):
        check_chat_template(prompt_format, template_text(tokenizer.chat_template))
    student_ids_of = {}
    source = DataSet(config.data.prompts, field="data.prompts")
    for where, record in open_records(source, prompt_format.columns):
        conversation = prompt_format.conversation(record, where)
        if conversation.up_to_answer().messages:
            conversation = conversation.up_to_answer().unanswered()
        teacher_ids, ids = (
            np.array(prompt_format.ids(tokenizer, conversation, where), np.int32)
            for tokenizer in (teacher_tokenizer, student_tokenizer)
        )
        student_ids_of[teacher_ids.tobytes()] = ids
    return student_ids_of


def _pending_rows(ids: Ids, start: int, rows: AlignedRows) -> PendingRows:
    sequence = TokenSequence(torch.from_numpy(ids.astype(np.int64)), start)
    return PendingRows(sequence, resolved(rows))


def _skipped_row(head_size: int) -> AlignedRows:
    """Return the row of one token that is not learned.

    `head_size`: the number of mapped head ids of a row; 0 if the rows have none.
    """
    no_tokens = np.zeros(1, np.bool_)
    rows = _build_rows(
        no_tokens.astype(np.float64), no_tokens.astype(np.int64), no_tokens, no_tokens
    )
    if not head_size:
        return rows
    ids = np.zeros((1, head_size), np.int32)
    return replace(rows, tail_sample_ids=ids, weights=ids.astype(np.float32))


def _build_rows(
    shares: NDArray[np.float64],
    unit: NDArray[np.int64],
    learned: NDArray[np.bool_],
    one_to_one: NDArray[np.bool_],
) -> AlignedRows:
    empty = np.zeros((len(shares), 0))
    return AlignedRows(
        head_ids=empty.astype(np.int32),
        head_logprobs=empty.astype(np.float32),
        tail_logmass=np.zeros(len(shares), np.float32),
        token_logprobs=shares.astype(np.float32),
        word=unit,
        learned=learned,
        one_to_one=one_to_one,
        spelled=True,
    )
