"""Alignment by bytes, against definitions that read one token at a time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.alignment.alignment import UNSETTLED, Aligner, Alignment
from clients.alignment.byte_tokenizer import ByteTokenizer
from protos.errors import InvalidInput
from tests.clients.alignment import trained

TOKENIZERS = {
    "small": trained.as_bytes(trained.byte_level(270)),
    "large": trained.as_bytes(trained.byte_level(340)),
    "fallback": trained.as_bytes(trained.byte_fallback(340)),
    "first space": trained.as_bytes(trained.byte_fallback(320, first_space=True)),
}
PAIRS = [(one, other) for one in TOKENIZERS for other in TOKENIZERS if one != other]
TEACHER_END = 1
TEXTS = st.text(st.sampled_from([*trained.TEXT, " ", "\n", "\u0301", "\u0645"]), max_size=40)


def aligner(pair: tuple[str, str]) -> Aligner:
    student, teacher = pair
    return Aligner(TOKENIZERS[student], TOKENIZERS[teacher], TEACHER_END)


def end_of(tokenizer: ByteTokenizer) -> int:
    """A special token."""
    return int(np.flatnonzero(tokenizer.lengths == 0)[0])


def spelled(tokenizer: ByteTokenizer, ids: np.ndarray) -> list[bytes]:
    """The bytes of each token."""
    return [tokenizer.data(ids[i : i + 1]) for i in range(len(ids))]


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.sampled_from(list(TOKENIZERS)))
def test_the_bytes_of_the_tokens_are_the_text(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.data(ids) == text.encode()
    assert b"".join(spelled(tokenizer, ids)) == text.encode()


@settings(deadline=None, max_examples=100)
@given(TEXTS, st.sampled_from(PAIRS), st.booleans())
def test_chunks_end_where_both_have_a_boundary(
    text: str, pair: tuple[str, str], ended: bool
) -> None:
    found_by = aligner(pair)
    ids = found_by.student.encode(text)
    if ended:
        ids = np.append(ids, np.int32(end_of(found_by.student)))
    found = found_by.align(ids, ended=ended)
    if not len(ids):
        assert found is None
        return
    assert found is not None
    assert found.complete
    assert found.canonical.all()
    assert found.read.all()
    teacher = found.teacher_ids[: len(found.teacher_ids) - ended]
    assert found_by.teacher.data(teacher) == text.encode() == found.text.encode()
    assert_chunks(found, found_by, ids, ended)
    if ended:
        assert (found.teacher_ids[-1], found.one_to_one[-1]) == (TEACHER_END, True)
        assert found.settled.all()
    else:
        last = set(found.teacher_chunk[-UNSETTLED:].tolist())
        expected = [number < min(last) for number in found.chunk.tolist()]
        assert found.settled.tolist() == expected


def assert_chunks(found: Alignment, of: Aligner, ids: np.ndarray, ended: bool) -> None:
    """By reading both one token at a time."""
    ours = np.cumsum([len(one) for one in spelled(of.student, ids)]).tolist()
    theirs = np.cumsum([len(one) for one in spelled(of.teacher, found.teacher_ids)]).tolist()
    if ended:  # they have no bytes, and come after all of them
        ours[-1], theirs[-1] = ours[-1] + 1, theirs[-1] + 1
    common = sorted({*ours} & {*theirs})
    assert found.chunk.tolist() == [sum(end > one for one in common) for end in ours]
    assert found.teacher_chunk.tolist() == [sum(end > one for one in common) for end in theirs]
    for number, single in zip(found.chunk, found.one_to_one, strict=True):
        sizes = ((found.chunk == number).sum(), (found.teacher_chunk == number).sum())
        assert single == (sizes == (1, 1))


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(PAIRS), st.booleans())
def test_any_tokens_that_a_student_samples(
    data: st.DataObject, pair: tuple[str, str], ended: bool
) -> None:
    """Other spellings, broken UTF-8, special tokens in the middle."""
    found_by = aligner(pair)
    one_id = st.integers(0, len(found_by.student.lengths) - 1)
    ids = np.array(data.draw(st.lists(one_id, min_size=1, max_size=12)), np.int32)
    if ended:
        ids = np.append(ids, np.int32(end_of(found_by.student)))
    found = found_by.align(ids, ended=ended)
    if found is None:
        return
    pieces = spelled(found_by.student, ids)
    before = b"".join(pieces[: pieces.index(b"")] if b"" in pieces else pieces)
    text = found.text.encode()
    assert before.startswith(text)
    assert found_by.teacher.data(found.teacher_ids).startswith(text)
    read = [len(b"".join(pieces[: i + 1])) <= len(text) for i in range(len(ids))]
    inside = pieces.index(b"") if b"" in pieces else len(ids)
    whole = before == text and inside == len(ids) - ended
    ends = ended and whole
    assert found.read.tolist() == [
        (i < inside and read[i]) or (i == len(ids) - 1 and ends) for i in range(len(ids))
    ]
    assert not (found.canonical & ~found.read).any()
    if found.complete and not whole:
        assert not ended
        assert 0 < len(before) - len(text) < 4
    again = found_by.student.encode(found.text)
    if whole and np.array_equal(again, ids[: len(ids) - ended]):
        assert found.canonical.all()
    elif whole:
        assert not found.canonical.all()


@settings(deadline=None, max_examples=40)
@given(TEXTS, st.sampled_from(PAIRS))
def test_what_a_prefix_fixes(text: str, pair: tuple[str, str]) -> None:
    """Never more than the tokens that both encodings begin with, minus the unsettled ones."""
    found_by = aligner(pair)
    ids = found_by.student.encode(text)
    found = found_by.align(ids, ended=False)
    if found is None:
        return
    fixed = found_by.fixed(ids, found)
    ends = np.cumsum([len(one) for one in spelled(found_by.student, ids)])
    for i, end in enumerate([0, *ends[:-1].tolist()]):
        before = found_by.teacher.encode(text.encode()[:end].decode(errors="ignore"))
        pairs = zip(before, found.teacher_ids, strict=False)
        common = next((n for n, (one, other) in enumerate(pairs) if one != other), len(before))
        assert fixed[i] <= max(common - UNSETTLED, 0)
    assert (np.diff(fixed) >= 0).all()


def test_a_special_token_is_no_text_and_its_name_is() -> None:
    student = TOKENIZERS["small"]
    text = f"so {trained.END} is"
    ids = student.encode(text)
    assert student.data(ids) == text.encode()
    assert end_of(student) not in ids.tolist()


def test_a_text_that_the_teacher_normalizes_is_left_out() -> None:
    document: dict[str, Any] = json.loads(trained.byte_level(300).to_str())
    teacher = ByteTokenizer(document | {"normalizer": {"type": "NFC"}}, "teacher", "x")
    found_by = Aligner(TOKENIZERS["small"], teacher, 0)
    assert found_by.align(found_by.student.encode("cafe\u0301 sat"), ended=False) is None
    assert found_by.align(found_by.student.encode("caf\u00e9 sat"), ended=False) is not None


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own() -> None:
    document = json.loads(trained.byte_level(300).to_str())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(InvalidInput, match=r"of the teacher does not tell .* decoder is WordPiece"):
        ByteTokenizer(document, "teacher", "teacher.tokenizer")
