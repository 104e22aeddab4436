"""Packed text encoded for the student, compared with the definition, one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clients.cross_tokenizer.alignment import Aligner, Alignment
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows
from student_trainer.cross_tokenizer.losses import Unit
from student_trainer.cross_tokenizer.store import unit_rows
from student_trainer.cross_tokenizer.stored_text import StoredText, leading_special_tokens
from tests.clients.cross_tokenizer import trained

TEACHER = trained.as_bytes(trained.byte_level(340))
STUDENT = trained.as_bytes(trained.byte_fallback(330, first_space=False))
END, STUDENT_END = 0, 1
ALIGNER = Aligner(TEACHER, STUDENT, STUDENT_END)
DOCUMENTS = ["the cat sat there. 12 + 34", "the dog", "caf\u00e9 12, and"]
NO_IDS = np.zeros(0, np.int32)


def pack_documents(documents: list[str]) -> np.ndarray:
    """Return a piece that begins within the first document and ends within the last."""
    ids = np.concatenate([np.append(TEACHER.encode(text), np.int32(END)) for text in documents])
    return ids[1:-1].astype(np.int32)


def block_of(ids: np.ndarray) -> RowBlock:
    """Return rows whose log-probs encode the token: -1, -2, ... from the second token on."""
    count = len(ids) - 1
    no_tail = np.zeros(count, np.float32)
    head = np.zeros((count, 2), np.int32)
    return RowBlock(head, head.astype(np.float32), no_tail, -np.arange(1, count + 1).astype("f4"))


def make_reader(unit: Unit, longest: int | None = None, **begins: Any) -> StoredText:
    def rows(alignment: Alignment, _: np.ndarray, block: RowBlock) -> AlignedRows:
        return unit_rows(alignment, block.token_logprobs, unit)

    begin_ids = {"begins": NO_IDS, "teacher_begins": NO_IDS} | begins
    ends = np.array([END], np.int32)
    return StoredText(ALIGNER, ends, **begin_ids, rows=rows, longest=longest)


def token_spans(ids: np.ndarray, tokenizer: Any, end: int) -> list[tuple[int, int, int]]:
    """Return (document, first byte, byte after the last) of each token; an end has one byte."""
    spans, document, offset = [], 0, 0
    for token in ids.tolist():
        size = 1 if token == end else int(tokenizer.lengths[token])
        spans.append((document, offset, offset + size))
        document, offset = (document + 1, 0) if token == end else (document, offset + size)
    return spans


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_units_of_packed_documents(unit: Unit) -> None:
    ids = pack_documents(DOCUMENTS)
    piece = make_reader(unit).read(ids, block_of(ids))
    assert piece is not None
    line, rows = piece
    assert len(rows) == len(line) - 1
    teacher_spans, student_spans = (
        token_spans(ids, TEACHER, END),
        token_spans(line, STUDENT, STUDENT_END),
    )
    texts = [TEACHER.data(part) for part in np.split(ids, np.flatnonzero(ids == END) + 1)]
    assert [STUDENT.data(p) for p in np.split(line, np.flatnonzero(line == STUDENT_END) + 1)] == (
        texts
    )
    borders = sorted(
        {(d, last) for d, _, last in teacher_spans} & {(d, last) for d, _, last in student_spans}
    )
    if unit == "word":
        borders = [
            (d, i) for d, i in borders if i >= len(texts[d]) or texts[d][i : i + 1] in b" \n"
        ]
    open_from = student_spans[-2][1]  # the last two tokens could change
    learned_count = 0
    for number, border in enumerate(borders):
        border_before = borders[number - 1] if number else (-1, 0)
        student_tokens = [
            i for i, (d, _, last) in enumerate(student_spans) if border_before < (d, last) <= border
        ]
        teacher_tokens = [
            i for i, (d, _, last) in enumerate(teacher_spans) if border_before < (d, last) <= border
        ]
        is_open = border[0] == len(texts) - 1 and border[1] > open_from
        is_learned = 0 not in teacher_tokens and not is_open
        row_numbers = [i - 1 for i in student_tokens if i]
        assert rows.learned[row_numbers].tolist() == [is_learned] * len(row_numbers)
        assert len(set(rows.word[row_numbers].tolist())) <= 1
        if is_learned:
            learned_count += len(row_numbers)
            assert rows.token_logprobs[row_numbers].sum() == -sum(teacher_tokens)
    assert 0 < learned_count < len(rows)
    assert np.diff(rows.word).min() >= 0
    assert rows.word[0] == 0
    assert rows.word[-1] < len(rows)


def test_a_line_is_cut_where_the_student_reads_no_further() -> None:
    ids = pack_documents(DOCUMENTS)
    piece = make_reader("word").read(ids, block_of(ids))
    assert piece is not None
    line, rows = piece
    row_number = next(i for i in range(8, len(rows)) if rows.word[i] == rows.word[i - 1])
    shorter_piece = make_reader("word", row_number + 1).read(ids, block_of(ids))
    assert shorter_piece is not None
    assert shorter_piece[0].tolist() == line[: row_number + 1].tolist()
    is_complete_word = rows.word[:row_number] != rows.word[row_number]
    assert (
        shorter_piece[1].learned.tolist() == (rows.learned[:row_number] & is_complete_word).tolist()
    )
    assert not shorter_piece[1].learned[-1]


def test_each_side_has_its_own_begin_of_a_document() -> None:
    """Begin tokens of documents: the teacher's id 5 stands in; the student's are two ends."""
    begin = np.array([5], np.int32)
    lengths = TEACHER.lengths.copy()
    try:
        TEACHER.lengths[5] = 0
        ids = np.concatenate(
            [pack_documents(["xthe cat", "a"])[:-1]]
            + [part for text in DOCUMENTS for part in (begin, TEACHER.encode(text), [END])]
        ).astype(np.int32)
        student_begin = np.array([STUDENT_END, STUDENT_END], np.int32)
        piece = make_reader("chunk", begins=student_begin, teacher_begins=begin).read(
            ids, block_of(ids)
        )
    finally:
        TEACHER.lengths[:] = lengths
    assert piece is not None
    line, rows = piece
    student_documents = [
        np.concatenate([student_begin, STUDENT.encode(text), [STUDENT_END]]) for text in DOCUMENTS
    ]
    first = line.tolist().index(STUDENT_END) + 1
    assert line[first:].tolist() == np.concatenate(student_documents).tolist()
    document_starts = np.cumsum([0, *map(len, student_documents)])[:-1] + first
    for document_start in document_starts.tolist():
        assert not rows.learned[[document_start - 1, document_start]].any()
        assert rows.learned[document_start + 1]


def test_a_document_that_the_student_changes_is_left_out() -> None:
    class ChangingTokenizer(type(STUDENT)):  # type: ignore[misc]
        def encode(self, text: str) -> np.ndarray:
            return super().encode(text.replace("dog", "cat"))

    changing_student = ChangingTokenizer.__new__(ChangingTokenizer)
    changing_student.__dict__.update(STUDENT.__dict__)
    ids = pack_documents(DOCUMENTS)
    text_reader = make_reader("chunk")
    text_reader = StoredText(
        **{**vars(text_reader), "aligner": Aligner(TEACHER, changing_student, STUDENT_END)}
    )
    piece = text_reader.read(ids, block_of(ids))
    assert piece is not None
    texts = b"".join([TEACHER.data(TEACHER.encode(text)) for text in (DOCUMENTS[0], DOCUMENTS[2])])
    assert texts.endswith(STUDENT.data(piece[0]))
    assert (
        text_reader.read(
            pack_documents(["dog dog", "dog"]), block_of(pack_documents(["dog dog", "dog"]))
        )
        is None
    )


def test_the_special_tokens_in_front_of_a_text() -> None:
    lengths = np.array([0, 0, 1])

    def tokenizer(ids: list[int]) -> Any:
        return lambda _: SimpleNamespace(input_ids=ids).__dict__

    assert leading_special_tokens(tokenizer([1, 0, 2]), lengths).tolist() == [1, 0]
    assert leading_special_tokens(tokenizer([2, 0]), lengths).tolist() == []
