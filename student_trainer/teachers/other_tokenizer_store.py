"""Stored rows of a teacher with another tokenizer, as sequences of the student.

A store has token ids of the teacher. The student reads its own encoding of the stored prompt and of
the answer's text. The stored log-probs of the answer's tokens become shares of the student's
tokens, for the losses of `losses/cross_tokenizer.py`. For `mapped_kl` the head ids of rows where
words begin become ids of the student; of the other rows only the log-prob of the token is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from clients.alignment.alignment import Aligner, Alignment
from clients.alignment.byte_tokenizer import ByteTokenizer
from clients.config.offline import OfflineJob
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from clients.data.records import DataSet
from clients.store.dataset import LogitDataset
from clients.teacher.query import tokenizer_fingerprint
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.data.aligned import AlignedRows
from student_trainer.data.captured_stores import Stores
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses import Unit
from student_trainer.losses.rows import LOWEST_LOGPROB
from student_trainer.model.loading import vocabulary
from student_trainer.teachers.role_store import RoleStore
from student_trainer.teachers.source import PendingRows, resolved
from student_trainer.teachers.stored_text import StoredText, begins_of
from student_trainer.teachers.tokenizer_pair import bytes_of, end_of, known_tokenizer, role_pair

log = logging.getLogger(__name__)

Ids = NDArray[np.int32]
_FIELD = "data.tokenizer"
_SPACES = np.frombuffer(b" \t\n\r", np.uint8)
# How stored rows are matched with the tokens of the student; see `method.match`.
Match = Literal["row", "chunk", "word"]


class StoredPrompts:
    """Turns stored prompts, ids of the teacher, into the student's ids of them."""

    def __init__(
        self, teacher: ByteTokenizer, tokenizer: Any, form: PromptFormat, known: Mapping[bytes, Ids]
    ) -> None:
        """`teacher`: its tokenizer. `tokenizer`: the student's. `form`: of its prompts.

        `known`: the student's ids of a prompt by the teacher's; empty: prompts are plain text.
        """
        self._teacher = teacher
        self._tokenizer = tokenizer
        self._form = replace(form, template="{prompt}")  # a stored prompt has its template
        self._known = known

    def __call__(self, ids: Ids) -> Ids | None:
        """Return the student's ids [P] of a stored prompt; None if they are not known.

        That is a prompt with special tokens, of a chat template, besides those in front of a text;
        and if `known` is not empty, any prompt that it does not have.
        """
        if self._known:
            return self._known.get(ids.tobytes())
        text = np.flatnonzero(self._teacher.lengths[ids])
        if not len(text) or not self._teacher.lengths[ids[text[0] :]].all():
            return None
        asked = self._form.asked(self._teacher.data(ids).decode("utf-8", "replace"))
        return np.array(self._form.ids(self._tokenizer, asked), np.int32)


@dataclass(frozen=True)
class TokenMap:
    """The teacher's ids as tokens of the student.

    first [V] int32: the first token of the student's encoding of the bytes of each id; of an end,
    its own end; -1: none, for special tokens. begins [V] bool: ids that begin a word, which are
    those with white space in front, and ends.
    """

    aligner: Aligner
    first: Ids
    begins: NDArray[np.bool_]

    @classmethod
    def of(cls, aligner: Aligner, ends: Ids) -> TokenMap:
        """Encode every token of the writer with the reader: about a second for 100,000 ids."""
        teacher, student = aligner.writer, aligner.reader
        first = np.full(len(teacher.lengths), -1, np.int32)
        begins = np.zeros(len(first), np.bool_)
        for number in np.flatnonzero(teacher.lengths):
            data = teacher.data(np.array([number]))
            ids = student.encode(data.decode("utf-8", "surrogateescape"))
            first[number] = ids[0] if len(ids) else -1
            begins[number] = data[0] in _SPACES
        first[ends], begins[ends] = aligner.reader_end, True
        return cls(aligner, first, begins)


class OtherTokenizerStore:
    """Reads stored sequences as sequences of the student, with AlignedRows."""

    def __init__(
        self,
        aligner: Aligner,
        prompts: StoredPrompts,
        ends: Ids,
        match: Match,
        longest: int | None,
        begins: tuple[Ids, Ids] | None = None,
    ) -> None:
        """Keep the parts.

        `aligner`: the teacher has written, the student reads. `ends`: the teacher's ids that end an
        answer. `match`: `method.match` of the job. `longest`: the most tokens that the student
        reads; longer sequences are left out. None: no limit. `begins`: the store has packed text;
        the special tokens of student and teacher in front of a document.
        """
        self._aligner = aligner
        self._prompts = prompts
        self._ends = ends
        self._match = match
        self._longest = longest
        self._map = TokenMap.of(aligner, ends) if match == "row" else None
        self._text = begins and StoredText(aligner, ends, *begins, self._rows, longest)

    @property
    def tokens(self) -> int:
        """Number of ids of the student's tokenizer; its model may have more logits."""
        return len(self._aligner.reader.lengths)

    def check_prompts(self, data: LogitDataset, label: str) -> None:
        """Raise InvalidInput if the student's ids of a stored prompt are not known."""
        for index in range(0 if self._text else len(data)):
            if self._prompts(data.prompt_ids(index)) is None:
                raise InvalidInput(
                    f"the prompt of sequence {index} of the {label} is in a chat template, or not"
                    " in data.prompts",
                    field="data.prompts",
                    hint="set it, with its columns, to the data set that was captured",
                )

    def read(self, data: LogitDataset, index: int) -> PendingRows:
        """Return stored sequence `index`, already resolved.

        A sequence that cannot be aligned, or is too long, has two tokens and no learned one. Packed
        text is cut. Raises Corrupt as `LogitDataset.decoded` does.
        """
        entry, block = data.decoded(index)
        ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int32)
        if self._text:
            line = self._text.read(ids, block)
            if line is None:
                end = np.int32(self._aligner.reader_end)
                return _sequence(np.array([end, end]), 1, self._left_out(block))
            return _sequence(line[0], 1, line[1])
        before, answer = self._prompts(ids[: entry.start]), ids[entry.start :]
        assert before is not None, "check_prompts has seen it"
        answer, ended = self._answer(answer)
        found = self._aligner.align(answer, ended=ended)
        if found is None or self._is_too_long(len(before) + len(found.reader_ids)):
            return _sequence(np.array([before[0], before[0]]), 1, self._left_out(block))
        rows = self._rows(found, answer, block.slice(0, len(answer)))
        return _sequence(np.concatenate([before, found.reader_ids]), len(before), rows)

    def _answer(self, ids: Ids) -> tuple[Ids, bool]:
        """Return the ids of an answer up to its end token, and whether it has one."""
        special = np.flatnonzero(self._aligner.writer.lengths[ids] == 0)
        if len(special) and ids[special[0]] in self._ends:
            return ids[: special[0] + 1], True
        return ids, False

    def _rows(self, found: Alignment, ids: Ids, block: RowBlock) -> AlignedRows:
        if self._match == "row":
            assert self._map is not None, "it is made for this match"
            return mapped_rows(found, ids, block, self._map)
        return unit_rows(found, block.token_logprobs, self._match)

    def _left_out(self, block: RowBlock) -> AlignedRows:
        return _left_out(block.k if self._map is not None else 0)

    def _is_too_long(self, tokens: int) -> bool:
        return self._longest is not None and tokens > self._longest


def unit_rows(found: Alignment, logprobs: NDArray[np.float32], unit: Unit) -> AlignedRows:
    """Return the rows [T] of the reader's tokens of an answer.

    `logprobs` [n]: of the writer's tokens. Their sum over a unit is the share of its first token.
    Units with a token that is not settled are not learned.
    """
    theirs, ours = found.chunk, found.reader_chunk
    if unit == "word":
        theirs, ours = found.word, found.reader_word
    count = int(ours.max()) + 1
    of_unit = np.bincount(theirs[found.read], logprobs[found.read], minlength=count)
    open_units = np.bincount(ours, ~found.reader_settled, minlength=count) > 0
    first = np.append(True, ours[1:] != ours[:-1])
    learned = ~open_units[ours]
    shares = np.where(first & learned, of_unit[ours], 0.0)
    return _rows(shares, np.cumsum(first) - 1, learned, found.reader_one_to_one)


def mapped_rows(found: Alignment, ids: Ids, block: RowBlock, tokens: TokenMap) -> AlignedRows:
    """Return the rows [T] of the reader's tokens of an answer, with the weights of `mapped_kl`.

    `ids` [n], `block` of n rows: the writer's tokens. `tail_sample_ids` of the result are the
    mapped head ids.
    """
    rows = unit_rows(found, block.token_logprobs, "chunk")
    assert block.head_ids is not None, "stored rows have their ids"
    data = np.frombuffer(found.data, np.uint8)
    starts = _starts(tokens.aligner.writer.lengths[ids[found.read]])
    own_starts = _starts(tokens.aligner.reader.lengths[found.reader_ids])
    places = np.minimum(np.searchsorted(starts, own_starts), len(starts) - 1)
    at = starts[places]
    # A word begins after a byte that is no white space; at the beginning, whatever comes begins.
    before = np.append(data, np.uint8(0))[at - 1]  # of the first byte: 0, no white space
    within = np.isin(before, _SPACES)
    heads = block.head_ids[places]
    log_q = np.maximum(block.head_logprobs[places].astype(np.float64), LOWEST_LOGPROB)
    fits = tokens.begins[heads] | (at == 0)[:, None]
    fits &= (tokens.first[heads] >= 0) & ((at == own_starts) & ~within)[:, None]
    written = fits & (heads == ids[places][:, None])
    used = written.any(1)[:, None] & fits
    q = np.where(used, np.exp(log_q), 0.0)
    weights = q / np.maximum(q.sum(1), np.finfo(np.float64).tiny)[:, None] - written
    weights = np.where(used, weights, 0.0)
    more = (weights * log_q).sum(1)
    return replace(
        rows,
        token_logprobs=(rows.token_logprobs + more).astype(np.float32),
        tail_sample_ids=np.where(used, tokens.first[heads], 0).astype(np.int32),
        weights=weights.astype(np.float32),
    )


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def other_tokenizer_store(
    config: OfflineJob, stores: Stores, ours: Any, longest: int | None
) -> OtherTokenizerStore | RoleStore | None:
    """Return the reader of a job's stores; None if they have the student's tokenizer, or must.

    `ours`: the student's tokenizer. `longest`: the most tokens that the student reads. Raises
    InvalidInput or WrongState, naming the key, if the tokenizer of the store is not found, is not
    the store's, or cannot be aligned, or if a prompt is not known.
    """
    wanted, store = config.data.tokenizer, stores.training
    fingerprint = store.facts["tokenizer_fingerprint"]
    if wanted == "same" or tokenizer_fingerprint(vocabulary(ours)) == fingerprint:
        _refuse_match(config, f"the {store.label} has the student's tokenizer")
        return None
    name = store.facts.get("tokenizer", "") if wanted == "auto" else wanted
    theirs = known_tokenizer(name, fingerprint, store.label, _FIELD)
    paired = role_pair(config.data.roles, ours, theirs, "data.roles")
    text = store.facts.get("form") == "text"
    prompts = StoredPrompts(
        bytes_of(theirs, "store", _FIELD),
        ours,
        config.data.prompt_format,
        _known(config, ours, theirs),
    )
    if paired is not None:
        _refuse_match(config, f"student and {store.label} differ in special tokens only")
        ids = paired.ids(int(store.facts["vocab_size"]))
        by_roles = RoleStore(ids, paired.tokens, None if text else prompts)
        for one in (store, stores.held_out):
            if one is not None:
                by_roles.check(one.data, one.label, longest)
        return by_roles
    aligner = Aligner(
        bytes_of(theirs, "store", _FIELD),
        bytes_of(ours, "student", "student.model"),
        end_of(ours, "student", "student.model"),
    )
    ends = {end_of(theirs, "store", _FIELD), theirs.eos_token_id} - {None}
    begins = begins_of(ours, aligner.reader.lengths), begins_of(theirs, aligner.writer.lengths)
    made = OtherTokenizerStore(
        aligner,
        prompts,
        np.array(sorted(ends), np.int32),
        config.method.match,
        longest,
        begins if text else None,
    )
    for one in (store, stores.held_out):
        if one is not None:
            made.check_prompts(one.data, one.label)
    log.info("the %s has another tokenizer: method.match = %s", store.label, config.method.match)
    return made


def _refuse_match(config: OfflineJob, found: str) -> None:
    if config.method.match != "row":
        raise InvalidInput(
            f"has no effect: {found}, so its rows are used as they are",
            field="method.match",
            hint="leave it out",
        )


def _known(config: OfflineJob, ours: Any, theirs: Any) -> dict[bytes, Ids]:
    """Return the student's ids of each prompt of `data.prompts` by those of the teacher."""
    if config.data.prompts is None:
        return {}
    form = config.data.prompt_format
    for tokenizer in (ours, theirs):
        check_chat_template(form, template_text(tokenizer.chat_template))
    found = {}
    source = DataSet(config.data.prompts, field="data.prompts")
    for number, record in enumerate(source.records(form.columns), 1):
        where = f"row {number} of {config.data.prompts}"
        asked = form.conversation(record, where)
        if asked.up_to_answer().messages:
            asked = asked.up_to_answer().unanswered()
        by, ids = (
            np.array(form.ids(tokenizer, asked, where), np.int32) for tokenizer in (theirs, ours)
        )
        found[by.tobytes()] = ids
    return found


def _sequence(ids: Ids, start: int, rows: AlignedRows) -> PendingRows:
    sequence = TokenSequence(torch.from_numpy(ids.astype(np.int64)), start)
    return PendingRows(sequence, resolved(rows))


def _left_out(head: int) -> AlignedRows:
    """Return the row of a token that is not learned. `head`: ids of a row, if they are mapped."""
    none = np.zeros(1, np.bool_)
    rows = _rows(none.astype(np.float64), none.astype(np.int64), none, none)
    if not head:
        return rows
    ids = np.zeros((1, head), np.int32)
    return replace(rows, tail_sample_ids=ids, weights=ids.astype(np.float32))


def _rows(
    shares: NDArray[np.float64],
    unit: NDArray[np.int64],
    learned: NDArray[np.bool_],
    one_to_one: NDArray[np.bool_],
) -> AlignedRows:
    none = np.zeros((len(shares), 0))
    return AlignedRows(
        head_ids=none.astype(np.int32),
        head_logprobs=none.astype(np.float32),
        tail_logmass=np.zeros(len(shares), np.float32),
        token_logprobs=shares.astype(np.float32),
        word=unit,
        learned=learned,
        one_to_one=one_to_one,
        spelled=True,
    )
