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
TEACHER_END = 0
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
    ids = found_by.writer.encode(text)
    if ended:
        ids = np.append(ids, np.int32(end_of(found_by.writer)))
    found = found_by.align(ids, has_end=ended)
    if not len(ids):
        assert found is None
        return
    assert found is not None
    assert not found.stopped
    assert found.canonical.all()
    assert found.read.all()
    teacher = found.reader_ids[: len(found.reader_ids) - ended]
    assert found_by.reader.data(teacher) == text.encode() == found.data
    assert_chunks(found, found_by, ids, ended)
    if ended:
        assert (found.reader_ids[-1], found.one_to_one[-1]) == (TEACHER_END, True)


def assert_chunks(found: Alignment, of: Aligner, ids: np.ndarray, ended: bool) -> None:
    """By reading both one token at a time. An end comes after all bytes."""
    ours = np.cumsum([len(one) for one in spelled(of.writer, ids)]).tolist()
    theirs = np.cumsum([len(one) for one in spelled(of.reader, found.reader_ids)]).tolist()
    if ended:
        ours[-1], theirs[-1] = ours[-1] + 1, theirs[-1] + 1
    common = sorted({*ours} & {*theirs})
    chunk = [sum(end > one for one in common) for end in ours]
    teacher_chunk = [sum(end > one for one in common) for end in theirs]
    assert found.chunk.tolist() == chunk
    assert found.reader_chunk.tolist() == teacher_chunk
    single = [chunk.count(one) == teacher_chunk.count(one) == 1 for one in range(len(common))]
    assert found.one_to_one.tolist() == [single[one] for one in chunk]
    assert found.reader_one_to_one.tolist() == [single[one] for one in teacher_chunk]
    last = len(common) if ended else min(teacher_chunk[-UNSETTLED:])
    assert found.settled.tolist() == [ended or number < last for number in chunk]
    assert found.reader_settled.tolist() == [ended or number < last for number in teacher_chunk]
    data = found.data + b" " * ended
    spaces = [data[i : i + 1] in (b" ", b"\n", b"\t", b"\r") for i in range(len(data))]
    starts = [i for i in common if i < len(spaces) and spaces[i] and not spaces[i - 1]]
    if ended and found.data and spaces[len(found.data) - 1]:
        starts.append(len(found.data))  # the end is a word of its own, also after a space
    words = [sum(end > one for one in starts) for end in ours]
    assert np.unique(found.word, return_inverse=True)[1].tolist() == words
    of_teacher = [sum(end > one for one in starts) for end in theirs]
    assert np.unique(found.reader_word, return_inverse=True)[1].tolist() == of_teacher


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(PAIRS), st.booleans())
def test_any_tokens_that_a_student_samples(
    data: st.DataObject, pair: tuple[str, str], ended: bool
) -> None:
    """Other spellings, broken UTF-8, special tokens in the middle."""
    found_by = aligner(pair)
    one_id = st.integers(0, len(found_by.writer.lengths) - 1)
    ids = np.array(data.draw(st.lists(one_id, min_size=1, max_size=12)), np.int32)
    if ended:
        ids = np.append(ids, np.int32(end_of(found_by.writer)))
    found = found_by.align(ids, has_end=ended)
    if found is None:
        return
    pieces = spelled(found_by.writer, ids)
    inside = pieces.index(b"") if b"" in pieces else len(ids)
    before = b"".join(pieces[:inside])
    assert before.startswith(found.data)
    assert len(before) - len(found.data) < 4
    assert found_by.reader.data(found.reader_ids) == found.data
    assert found.stopped == (inside < len(ids) - ended)
    if ended or found.stopped:
        assert found.data == before
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(ids))]
    read = [i < inside and end <= len(found.data) for i, end in enumerate(ends)]
    if ended and not found.stopped:
        read[-1] = True
    assert found.read.tolist() == read
    assert not (found.canonical & ~found.read).any()
    again = found_by.writer.encode(found.data.decode("utf-8", "surrogateescape"))
    spelled_so = np.array_equal(again, ids[: found.read.sum() - (ended and not found.stopped)])
    if found.data == before:
        assert bool(found.canonical[found.read].all()) == spelled_so


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.text(st.sampled_from("xtd .\n46"), max_size=4), st.sampled_from(list(TOKENIZERS)))
def test_what_follows_a_word_does_not_change_it(text: str, more: str, name: str) -> None:
    """The tokens before the last word that has begun are the same for every continuation."""
    teacher = TOKENIZERS[name]
    data = text.encode()
    spaces = [one in b" \n\t\r" for one in data]
    begun = max((i for i in range(1, len(data)) if spaces[i] and not spaces[i - 1]), default=0)
    ids = teacher.encode(text)
    fixed = [one for one, end in zip(ids, teacher.ends(ids), strict=True) if end <= begun]
    assert teacher.encode(text + more).tolist()[: len(fixed)] == fixed


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
    assert found_by.align(found_by.writer.encode("cafe\u0301 sat"), has_end=False) is None
    assert found_by.align(found_by.writer.encode("caf\u00e9 sat"), has_end=False) is not None


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own() -> None:
    document = json.loads(trained.byte_level(300).to_str())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(InvalidInput, match=r"of the teacher does not tell .* decoder is WordPiece"):
        ByteTokenizer(document, "teacher", "teacher.tokenizer")
