"""Head ids of the student mapped to tokens of the teacher, compared with the tokenizers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from clients.cross_tokenizer.alignment import Aligner
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows
from student_trainer.cross_tokenizer.matched_heads import HeadMap
from student_trainer.cross_tokenizer.teacher import CrossTokenizerTeacher
from student_trainer.teachers.source import resolved
from tests.clients.cross_tokenizer import trained
from tests.student_trainer.cross_tokenizer.test_teacher import rollout_of

TEXT = "the cat sat there too, and  the 12 cats\nsat. 34"
TEXT_WITH_LINES = trained.TEXT.replace(" ", "\n ")
PAIRS = [
    (trained.byte_level(290), trained.byte_level(340)),
    (trained.byte_level(290), trained.byte_fallback(330, TEXT_WITH_LINES)),
    (trained.byte_fallback(330, TEXT_WITH_LINES), trained.byte_level(300)),
    # The teacher has tokens that span two words.
    (trained.byte_level(290), trained.byte_fallback(330)),
]


def end_of(tokenizer: Any) -> int:
    return int(tokenizer.token_to_id(trained.END))


@pytest.fixture(params=range(len(PAIRS)))
def aligner(request: pytest.FixtureRequest) -> tuple[Aligner, int]:
    student, teacher = PAIRS[request.param]
    tokenizers = (trained.as_bytes(tokenizer) for tokenizer in (student, teacher))
    return Aligner(*tokenizers, end_of(teacher)), end_of(student)


def heads_of(aligner: Aligner, ids: np.ndarray, end: int) -> np.ndarray:
    """Return heads with the token, the end and other ids."""
    random = np.random.default_rng(0)
    heads = [
        [
            token,
            *random.choice(np.setdiff1d(np.arange(len(aligner.writer.lengths)), token), 60, False),
        ]
        for token in ids
    ]
    head_ids = np.array(heads, np.int32)
    head_ids[:, -1] = np.where((head_ids == end).any(1), head_ids[:, -1], end)
    return head_ids


def match_by_definition(
    aligner: Aligner, ids: np.ndarray, head: np.ndarray, i: int, end: int
) -> dict[int, int]:
    """Return the set S of token i, with the teacher's token of each id."""
    prefix = aligner.writer.data(ids[:i])
    matches = {}
    for u in head.tolist():
        data = aligner.writer.data(np.array([u]))
        teacher_ids = [aligner.reader_end] if u == end else encode_exactly(aligner.reader, data)
        has_ended = prefix[-1:] not in (b" ", b"\n") and not any(
            prefix[-1:] + b" " in token
            for tokenizer in (aligner.writer, aligner.reader)
            for token in tokens_of(tokenizer)
        )
        is_word_start = not prefix or (has_ended and (u == end or data[:1] == b" "))
        if is_word_start and len(teacher_ids) == 1 and (u == end or data):
            matches[u] = teacher_ids[0]
    return matches if ids[i] in matches else {}


@cache
def tokens_of(tokenizer: ByteTokenizer) -> list[bytes]:
    return [tokenizer.data(np.array([number])) for number in range(len(tokenizer.lengths))]


def encode_exactly(tokenizer: ByteTokenizer, data: bytes) -> list[int]:
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    return ids.tolist() if tokenizer.data(ids) == data else []


def test_the_sets_and_where_the_teacher_reads_them(aligner: tuple[Aligner, int]) -> None:
    word_aligner, end = aligner
    ids = np.append(word_aligner.writer.encode(TEXT), np.int32(end))
    heads = heads_of(word_aligner, ids, end)
    alignment = word_aligner.align(ids, has_end=True)
    assert alignment is not None
    matched = HeadMap.build(word_aligner, end).match(ids, heads, alignment)
    teacher_ids = matched.teacher_ids(len(alignment.reader_ids))
    word_count = 0
    for i in range(len(ids)):
        expected = match_by_definition(word_aligner, ids, heads[i], i, end)
        columns = (table[i][matched.matched[i]].tolist() for table in (heads, matched.ids))
        assert dict(zip(*columns, strict=True)) == expected, i
        if not expected:
            continue
        word_count += 1
        prefix = word_aligner.writer.data(ids[:i])
        teacher_row = len(encode_exactly(word_aligner.reader, prefix))
        assert matched.teacher_rows[i] == teacher_row
        assert teacher_ids[teacher_row].tolist() == matched.ids[i].tolist()
        for u in expected:  # the encoding of the text before does not depend on the id
            continued = prefix + word_aligner.writer.data(np.array([u])) + b"at cat"
            assert encode_exactly(word_aligner.reader, continued)[:teacher_row] == encode_exactly(
                word_aligner.reader, prefix
            )
    crosses_words = not all(
        token.isspace() for token in tokens_of(word_aligner.reader) if b" " in token[1:]
    )
    assert word_count > (0 if crosses_words else 5)


def test_without_an_end_the_last_tokens_have_none(aligner: tuple[Aligner, int]) -> None:
    word_aligner, end = aligner
    ids = word_aligner.writer.encode(TEXT)
    alignment = word_aligner.align(ids, has_end=False)
    assert alignment is not None
    matched = (
        HeadMap.build(word_aligner, None)
        .match(ids, heads_of(word_aligner, ids, end), alignment)
        .matched
    )
    assert matched.any()
    assert not matched[~alignment.settled].any()


class TableClient:
    """A client that returns the log-prob -row - id / 1000 at every id."""

    def submit(self, query: ScoreQuery) -> Any:
        assert query.head_ids is not None
        assert query.draw_ids is not None
        rows = np.arange(query.rows, dtype=np.float32)[:, None]
        token = -rows[:, 0] - query.token_ids[query.start :] / 1000
        no_tail = np.zeros(query.rows, np.float32)
        head = np.zeros(query.head_ids.shape, np.float16)
        draw_logprobs = (-rows - query.draw_ids / 1000).astype(np.float32)
        return resolved(
            RowBlock(
                query.head_ids, head, no_tail, token, query.draw_ids, draw_logprobs=draw_logprobs
            )
        )


def test_the_rows_of_the_teacher(aligner: tuple[Aligner, int]) -> None:
    word_aligner, end = aligner
    ids = np.append(word_aligner.writer.encode(TEXT), np.int32(end))
    heads = heads_of(word_aligner, ids, end)
    rollout = rollout_of(ids, ended=True)
    object.__setattr__(rollout, "head_ids", torch.from_numpy(heads))
    client: Any = TableClient()
    teacher = CrossTokenizerTeacher(
        client,
        word_aligner,
        lambda _: torch.tensor([3, 4]),
        temperature=1.0,
        max_length=100,
        heads=HeadMap.build(word_aligner, end),
    )
    rows = teacher.score(rollout).result()
    assert isinstance(rows, AlignedRows)
    assert rows.matched is not None
    match_count = 0
    for i, u in np.argwhere(rows.matched).tolist():
        teacher_id = match_by_definition(word_aligner, ids, heads[i], i, end)[int(heads[i, u])]
        teacher_row = len(encode_exactly(word_aligner.reader, word_aligner.writer.data(ids[:i])))
        assert rows.head_logprobs[i, u] == pytest.approx(-teacher_row - teacher_id / 1000, abs=1e-5)
        match_count += 1
    assert match_count > 5
    teacher._max_length = 10
    left_out = teacher.score(rollout).result()
    assert isinstance(left_out, AlignedRows)
    assert left_out.matched is not None
    assert left_out.matched.shape == heads.shape
    assert not left_out.matched.any()
