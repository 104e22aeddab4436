"""Alignment by bytes, compared with definitions that process one token at a time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.cross_tokenizer.alignment import UNSETTLED, Aligner, Alignment
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer
from protos.errors import InvalidInput
from tests.clients.cross_tokenizer import trained

TOKENIZERS = {
    "small": trained.as_bytes(trained.byte_level(270)),
    "large": trained.as_bytes(trained.byte_level(340)),
    "fallback": trained.as_bytes(trained.byte_fallback(340)),
    "first space": trained.as_bytes(trained.byte_fallback(320, first_space=True)),
}
PAIRS = [
    (student, teacher) for student in TOKENIZERS for teacher in TOKENIZERS if student != teacher
]
TEACHER_END = 0
TEXTS = st.text(st.sampled_from([*trained.TEXT, " ", "\n", "\u0301", "\u0645"]), max_size=40)


def build_aligner(pair: tuple[str, str]) -> Aligner:
    student, teacher = pair
    return Aligner(TOKENIZERS[student], TOKENIZERS[teacher], TEACHER_END)


def special_token_of(tokenizer: ByteTokenizer) -> int:
    """Return the id of the first special token."""
    return int(np.flatnonzero(tokenizer.lengths == 0)[0])


def bytes_of_tokens(tokenizer: ByteTokenizer, ids: np.ndarray) -> list[bytes]:
    """Return the bytes of each token."""
    return [tokenizer.data(ids[i : i + 1]) for i in range(len(ids))]


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.sampled_from(list(TOKENIZERS)))
def test_the_bytes_of_the_tokens_are_the_text(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.data(ids) == text.encode()
    assert b"".join(bytes_of_tokens(tokenizer, ids)) == text.encode()


@settings(deadline=None, max_examples=100)
@given(TEXTS, st.sampled_from(PAIRS), st.booleans())
def test_chunks_end_where_both_have_a_boundary(
    text: str, pair: tuple[str, str], has_end: bool
) -> None:
    aligner = build_aligner(pair)
    ids = aligner.writer.encode(text)
    if has_end:
        ids = np.append(ids, np.int32(special_token_of(aligner.writer)))
    alignment = aligner.align(ids, has_end=has_end)
    if not len(ids):
        assert alignment is None
        return
    assert alignment is not None
    assert not alignment.stopped
    assert alignment.canonical.all()
    assert alignment.read.all()
    teacher = alignment.reader_ids[: len(alignment.reader_ids) - has_end]
    assert aligner.reader.data(teacher) == text.encode() == alignment.data
    assert_chunks(alignment, aligner, ids, has_end)
    if has_end:
        assert (alignment.reader_ids[-1], alignment.one_to_one[-1]) == (TEACHER_END, True)


def assert_chunks(alignment: Alignment, aligner: Aligner, ids: np.ndarray, has_end: bool) -> None:
    """Compare with chunks computed token by token. The end token comes after all bytes."""
    student_ends = np.cumsum(
        [len(token) for token in bytes_of_tokens(aligner.writer, ids)]
    ).tolist()
    teacher_ends = np.cumsum(
        [len(token) for token in bytes_of_tokens(aligner.reader, alignment.reader_ids)]
    ).tolist()
    if has_end:
        student_ends[-1], teacher_ends[-1] = student_ends[-1] + 1, teacher_ends[-1] + 1
    common = sorted({*student_ends} & {*teacher_ends})
    chunk = [sum(end > boundary for boundary in common) for end in student_ends]
    teacher_chunk = [sum(end > boundary for boundary in common) for end in teacher_ends]
    assert alignment.chunk.tolist() == chunk
    assert alignment.reader_chunk.tolist() == teacher_chunk
    single = [chunk.count(index) == teacher_chunk.count(index) == 1 for index in range(len(common))]
    assert alignment.one_to_one.tolist() == [single[index] for index in chunk]
    assert alignment.reader_one_to_one.tolist() == [single[index] for index in teacher_chunk]
    unsettled_chunk = len(common) if has_end else min(teacher_chunk[-UNSETTLED:])
    assert alignment.settled.tolist() == [has_end or number < unsettled_chunk for number in chunk]
    assert alignment.reader_settled.tolist() == [
        has_end or number < unsettled_chunk for number in teacher_chunk
    ]
    data = alignment.data + b" " * has_end
    spaces = [data[i : i + 1] in (b" ", b"\n", b"\t", b"\r") for i in range(len(data))]
    starts = [i for i in common if i < len(spaces) and spaces[i] and not spaces[i - 1]]
    if has_end and alignment.data and spaces[len(alignment.data) - 1]:
        starts.append(len(alignment.data))  # the end is a word of its own, also after a space
    words = [sum(end > start for start in starts) for end in student_ends]
    assert np.unique(alignment.word, return_inverse=True)[1].tolist() == words
    teacher_words = [sum(end > start for start in starts) for end in teacher_ends]
    assert np.unique(alignment.reader_word, return_inverse=True)[1].tolist() == teacher_words


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(PAIRS), st.booleans())
def test_any_tokens_that_a_student_samples(
    data: st.DataObject, pair: tuple[str, str], has_end: bool
) -> None:
    """Non-canonical tokens, broken UTF-8, special tokens in the middle."""
    aligner = build_aligner(pair)
    token_ids = st.integers(0, len(aligner.writer.lengths) - 1)
    ids = np.array(data.draw(st.lists(token_ids, min_size=1, max_size=12)), np.int32)
    if has_end:
        ids = np.append(ids, np.int32(special_token_of(aligner.writer)))
    alignment = aligner.align(ids, has_end=has_end)
    if alignment is None:
        return
    pieces = bytes_of_tokens(aligner.writer, ids)
    stop_index = pieces.index(b"") if b"" in pieces else len(ids)
    data_before_stop = b"".join(pieces[:stop_index])
    assert data_before_stop.startswith(alignment.data)
    assert len(data_before_stop) - len(alignment.data) < 4
    assert aligner.reader.data(alignment.reader_ids) == alignment.data
    assert alignment.stopped == (stop_index < len(ids) - has_end)
    if has_end or alignment.stopped:
        assert alignment.data == data_before_stop
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(ids))]
    is_read = [i < stop_index and end <= len(alignment.data) for i, end in enumerate(ends)]
    if has_end and not alignment.stopped:
        is_read[-1] = True
    assert alignment.read.tolist() == is_read
    assert not (alignment.canonical & ~alignment.read).any()
    canonical_ids = aligner.writer.encode(alignment.data.decode("utf-8", "surrogateescape"))
    is_canonical = np.array_equal(
        canonical_ids, ids[: alignment.read.sum() - (has_end and not alignment.stopped)]
    )
    if alignment.data == data_before_stop:
        assert bool(alignment.canonical[alignment.read].all()) == is_canonical


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.text(st.sampled_from("xtd .\n46"), max_size=4), st.sampled_from(list(TOKENIZERS)))
def test_what_follows_a_word_does_not_change_it(text: str, suffix: str, name: str) -> None:
    """The tokens before the start of the last word are the same for every continuation."""
    teacher = TOKENIZERS[name]
    data = text.encode()
    spaces = [byte in b" \n\t\r" for byte in data]
    last_word_start = max(
        (i for i in range(1, len(data)) if spaces[i] and not spaces[i - 1]), default=0
    )
    ids = teacher.encode(text)
    fixed = [
        token for token, end in zip(ids, teacher.ends(ids), strict=True) if end <= last_word_start
    ]
    assert teacher.encode(text + suffix).tolist()[: len(fixed)] == fixed


def test_a_special_token_is_no_text_and_its_name_is() -> None:
    student = TOKENIZERS["small"]
    text = f"so {trained.END} is"
    ids = student.encode(text)
    assert student.data(ids) == text.encode()
    assert special_token_of(student) not in ids.tolist()


def test_a_text_that_the_teacher_normalizes_is_left_out() -> None:
    document: dict[str, Any] = json.loads(trained.byte_level(300).to_str())
    teacher = ByteTokenizer(document | {"normalizer": {"type": "NFC"}}, "teacher", "x")
    aligner = Aligner(TOKENIZERS["small"], teacher, 0)
    assert aligner.align(aligner.writer.encode("cafe\u0301 sat"), has_end=False) is None
    assert aligner.align(aligner.writer.encode("caf\u00e9 sat"), has_end=False) is not None


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own() -> None:
    document = json.loads(trained.byte_level(300).to_str())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(
        InvalidInput,
        match=r"of the teacher does not define .* decoder is"
        " WordPiece",
    ):
        ByteTokenizer(document, "teacher", "teacher.tokenizer")
