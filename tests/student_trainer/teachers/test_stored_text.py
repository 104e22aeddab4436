"""Packed text as a line of the student, against the definition, one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clients.alignment.alignment import Aligner, Alignment
from protos.rows.codec import RowBlock
from student_trainer.data.aligned import AlignedRows
from student_trainer.losses import Unit
from student_trainer.teachers.other_tokenizer_store import unit_rows
from student_trainer.teachers.stored_text import StoredText, leading_special_tokens
from tests.clients.alignment import trained

TEACHER = trained.as_bytes(trained.byte_level(340))
STUDENT = trained.as_bytes(trained.byte_fallback(330, first_space=False))
END, STUDENT_END = 0, 1
ALIGNER = Aligner(TEACHER, STUDENT, STUDENT_END)
DOCUMENTS = ["the cat sat there. 12 + 34", "the dog", "caf\u00e9 12, and"]
NONE = np.zeros(0, np.int32)


def packed(documents: list[str]) -> np.ndarray:
    """The last document is open; the piece begins within the first."""
    ids = np.concatenate([np.append(TEACHER.encode(text), np.int32(END)) for text in documents])
    return ids[1:-1].astype(np.int32)


def block_of(ids: np.ndarray) -> RowBlock:
    """Log-probs that say which token they are of: -1, -2, ... from the second on."""
    count = len(ids) - 1
    none = np.zeros(count, np.float32)
    head = np.zeros((count, 2), np.int32)
    return RowBlock(head, head.astype(np.float32), none, -np.arange(1, count + 1).astype("f4"))


def reader(unit: Unit, longest: int | None = None, **begins: Any) -> StoredText:
    def rows(found: Alignment, _: np.ndarray, block: RowBlock) -> AlignedRows:
        return unit_rows(found, block.token_logprobs, unit)

    both = {"begins": NONE, "teacher_begins": NONE} | begins
    ends = np.array([END], np.int32)
    return StoredText(ALIGNER, ends, **both, rows=rows, longest=longest)


def spans(ids: np.ndarray, tokenizer: Any, end: int) -> list[tuple[int, int, int]]:
    """Document, first byte in it, and byte after the last, of each token; an end has one."""
    found, document, at = [], 0, 0
    for token in ids.tolist():
        size = 1 if token == end else int(tokenizer.lengths[token])
        found.append((document, at, at + size))
        document, at = (document + 1, 0) if token == end else (document, at + size)
    return found


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_units_of_packed_documents(unit: Unit) -> None:
    ids = packed(DOCUMENTS)
    read = reader(unit).read(ids, block_of(ids))
    assert read is not None
    line, rows = read
    assert len(rows) == len(line) - 1
    theirs, ours = spans(ids, TEACHER, END), spans(line, STUDENT, STUDENT_END)
    texts = [TEACHER.data(part) for part in np.split(ids, np.flatnonzero(ids == END) + 1)]
    assert [STUDENT.data(p) for p in np.split(line, np.flatnonzero(line == STUDENT_END) + 1)] == (
        texts
    )
    borders = sorted({(d, last) for d, _, last in theirs} & {(d, last) for d, _, last in ours})
    if unit == "word":
        borders = [
            (d, i) for d, i in borders if i >= len(texts[d]) or texts[d][i : i + 1] in b" \n"
        ]
    open_from = ours[-2][1]  # the last two tokens could change
    learned = 0
    for number, border in enumerate(borders):
        before = borders[number - 1] if number else (-1, 0)
        mine = [i for i, (d, _, last) in enumerate(ours) if before < (d, last) <= border]
        their = [i for i, (d, _, last) in enumerate(theirs) if before < (d, last) <= border]
        is_open = border[0] == len(texts) - 1 and border[1] > open_from
        wanted = 0 not in their and not is_open
        seen = [i - 1 for i in mine if i]
        assert rows.learned[seen].tolist() == [wanted] * len(seen)
        assert len(set(rows.word[seen].tolist())) <= 1
        if wanted:
            learned += len(seen)
            assert rows.token_logprobs[seen].sum() == -sum(their)
    assert 0 < learned < len(rows)
    assert np.diff(rows.word).min() >= 0
    assert rows.word[0] == 0
    assert rows.word[-1] < len(rows)


def test_a_line_is_cut_where_the_student_reads_no_further() -> None:
    ids = packed(DOCUMENTS)
    read = reader("word").read(ids, block_of(ids))
    assert read is not None
    line, rows = read
    at = next(i for i in range(8, len(rows)) if rows.word[i] == rows.word[i - 1])
    cut = reader("word", at + 1).read(ids, block_of(ids))
    assert cut is not None
    assert cut[0].tolist() == line[: at + 1].tolist()
    whole = rows.word[:at] != rows.word[at]
    assert cut[1].learned.tolist() == (rows.learned[:at] & whole).tolist()
    assert not cut[1].learned[-1]


def test_each_side_has_its_own_begin_of_a_document() -> None:
    """The teacher has one (here its id 5 stands in), and so has the student (6, 6)."""
    begin = np.array([5], np.int32)
    lengths = TEACHER.lengths.copy()
    try:
        TEACHER.lengths[5] = 0
        ids = np.concatenate(
            [packed(["xthe cat", "a"])[:-1]]
            + [part for text in DOCUMENTS for part in (begin, TEACHER.encode(text), [END])]
        ).astype(np.int32)
        ours = np.array([STUDENT_END, STUDENT_END], np.int32)
        read = reader("chunk", begins=ours, teacher_begins=begin).read(ids, block_of(ids))
    finally:
        TEACHER.lengths[:] = lengths
    assert read is not None
    line, rows = read
    own = [np.concatenate([ours, STUDENT.encode(text), [STUDENT_END]]) for text in DOCUMENTS]
    first = line.tolist().index(STUDENT_END) + 1
    assert line[first:].tolist() == np.concatenate(own).tolist()
    begun = np.cumsum([0, *map(len, own)])[:-1] + first
    for at in begun.tolist():
        assert not rows.learned[[at - 1, at]].any()
        assert rows.learned[at + 1]


def test_a_document_that_the_student_changes_is_left_out() -> None:
    class Changed(type(STUDENT)):  # type: ignore[misc]
        def encode(self, text: str) -> np.ndarray:
            return super().encode(text.replace("dog", "cat"))

    changed = Changed.__new__(Changed)
    changed.__dict__.update(STUDENT.__dict__)
    ids = packed(DOCUMENTS)
    made = reader("chunk")
    made = StoredText(**{**vars(made), "aligner": Aligner(TEACHER, changed, STUDENT_END)})
    read = made.read(ids, block_of(ids))
    assert read is not None
    texts = b"".join([TEACHER.data(TEACHER.encode(text)) for text in (DOCUMENTS[0], DOCUMENTS[2])])
    assert texts.endswith(STUDENT.data(read[0]))
    assert made.read(packed(["dog dog", "dog"]), block_of(packed(["dog dog", "dog"]))) is None


def test_the_special_tokens_in_front_of_a_text() -> None:
    lengths = np.array([0, 0, 1])

    def tokenizer(ids: list[int]) -> Any:
        return lambda _: SimpleNamespace(input_ids=ids).__dict__

    assert leading_special_tokens(tokenizer([1, 0, 2]), lengths).tolist() == [1, 0]
    assert leading_special_tokens(tokenizer([2, 0]), lengths).tolist() == []
