"""Head ids of the student as tokens of the teacher, compared with the tokenizers themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from clients.alignment.alignment import Aligner
from clients.alignment.byte_tokenizer import ByteTokenizer
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.data.aligned import AlignedRows
from student_trainer.teachers.matched_heads import HeadMap
from student_trainer.teachers.other_tokenizer import OtherTokenizerTeacher
from student_trainer.teachers.source import resolved
from tests.clients.alignment import trained
from tests.student_trainer.teachers.test_other_tokenizer import rollout_of

TEXT = "the cat sat there too, and  the 12 cats\nsat. 34"
APART = trained.TEXT.replace(" ", "\n ")
PAIRS = [
    (trained.byte_level(290), trained.byte_level(340)),
    (trained.byte_level(290), trained.byte_fallback(330, APART)),
    (trained.byte_fallback(330, APART), trained.byte_level(300)),
    # The teacher has tokens from one word into the next.
    (trained.byte_level(290), trained.byte_fallback(330)),
]


def end_of(tokenizer: Any) -> int:
    return int(tokenizer.token_to_id(trained.END))


@pytest.fixture(params=range(len(PAIRS)))
def aligner(request: pytest.FixtureRequest) -> tuple[Aligner, int]:
    student, teacher = PAIRS[request.param]
    both = (trained.as_bytes(one) for one in (student, teacher))
    return Aligner(*both, end_of(teacher)), end_of(student)


def heads_of(aligner: Aligner, ids: np.ndarray, end: int) -> np.ndarray:
    """The token itself, the end and other ids."""
    random = np.random.default_rng(0)
    heads = [
        [
            token,
            *random.choice(np.setdiff1d(np.arange(len(aligner.writer.lengths)), token), 60, False),
        ]
        for token in ids
    ]
    found = np.array(heads, np.int32)
    found[:, -1] = np.where((found == end).any(1), found[:, -1], end)
    return found


def wanted(aligner: Aligner, ids: np.ndarray, head: np.ndarray, i: int, end: int) -> dict[int, int]:
    """The set S of token i, with the teacher's token of each id."""
    before = aligner.writer.data(ids[:i])
    found = {}
    for u in head.tolist():
        data = aligner.writer.data(np.array([u]))
        theirs = [aligner.reader_end] if u == end else encoded(aligner.reader, data)
        ended = before[-1:] not in (b" ", b"\n") and not any(
            before[-1:] + b" " in token
            for one in (aligner.writer, aligner.reader)
            for token in tokens_of(one)
        )
        begins = not before or (ended and (u == end or data[:1] == b" "))
        if begins and len(theirs) == 1 and (u == end or data):
            found[u] = theirs[0]
    return found if ids[i] in found else {}


@cache
def tokens_of(tokenizer: ByteTokenizer) -> list[bytes]:
    return [tokenizer.data(np.array([number])) for number in range(len(tokenizer.lengths))]


def encoded(tokenizer: ByteTokenizer, data: bytes) -> list[int]:
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    return ids.tolist() if tokenizer.data(ids) == data else []


def test_the_sets_and_where_the_teacher_reads_them(aligner: tuple[Aligner, int]) -> None:
    both, end = aligner
    ids = np.append(both.writer.encode(TEXT), np.int32(end))
    heads = heads_of(both, ids, end)
    found = both.align(ids, has_end=True)
    assert found is not None
    matched = HeadMap.build(both, end).match(ids, heads, found)
    asked = matched.teacher_ids(len(found.reader_ids))
    of_words = 0
    for i in range(len(ids)):
        expected = wanted(both, ids, heads[i], i, end)
        mine = (of[i][matched.matched[i]].tolist() for of in (heads, matched.ids))
        assert dict(zip(*mine, strict=True)) == expected, i
        if not expected:
            continue
        of_words += 1
        before = both.writer.data(ids[:i])
        place = len(encoded(both.reader, before))
        assert matched.teacher_rows[i] == place
        assert asked[place].tolist() == matched.ids[i].tolist()
        for u in expected:  # whichever comes, the text before is encoded alike
            after = before + both.writer.data(np.array([u])) + b"at cat"
            assert encoded(both.reader, after)[:place] == encoded(both.reader, before)
    crossing = not all(of.isspace() for of in tokens_of(both.reader) if b" " in of[1:])
    assert of_words > (0 if crossing else 5)


def test_without_an_end_the_last_tokens_have_none(aligner: tuple[Aligner, int]) -> None:
    both, end = aligner
    ids = both.writer.encode(TEXT)
    found = both.align(ids, has_end=False)
    assert found is not None
    matched = HeadMap.build(both, None).match(ids, heads_of(both, ids, end), found).matched
    assert matched.any()
    assert not matched[~found.settled].any()


class Table:
    """A client that answers with the log-prob -row - id / 1000 at every id."""

    def submit(self, query: ScoreQuery) -> Any:
        assert query.head_ids is not None
        assert query.draw_ids is not None
        rows = np.arange(query.rows, dtype=np.float32)[:, None]
        token = -rows[:, 0] - query.token_ids[query.start :] / 1000
        none = np.zeros(query.rows, np.float32)
        head = np.zeros(query.head_ids.shape, np.float16)
        of_draws = (-rows - query.draw_ids / 1000).astype(np.float32)
        return resolved(
            RowBlock(query.head_ids, head, none, token, query.draw_ids, draw_logprobs=of_draws)
        )


def test_the_rows_of_the_teacher(aligner: tuple[Aligner, int]) -> None:
    both, end = aligner
    ids = np.append(both.writer.encode(TEXT), np.int32(end))
    heads = heads_of(both, ids, end)
    rollout = rollout_of(ids, ended=True)
    object.__setattr__(rollout, "head_ids", torch.from_numpy(heads))
    client: Any = Table()
    teacher = OtherTokenizerTeacher(
        client,
        both,
        lambda _: torch.tensor([3, 4]),
        temperature=1.0,
        max_length=100,
        heads=HeadMap.build(both, end),
    )
    rows = teacher.score(rollout).result()
    assert isinstance(rows, AlignedRows)
    assert rows.matched is not None
    used = 0
    for i, u in np.argwhere(rows.matched).tolist():
        theirs = wanted(both, ids, heads[i], i, end)[int(heads[i, u])]
        place = len(encoded(both.reader, both.writer.data(ids[:i])))
        assert rows.head_logprobs[i, u] == pytest.approx(-place - theirs / 1000, abs=1e-5)
        used += 1
    assert used > 5
    teacher._max_length = 10
    left_out = teacher.score(rollout).result()
    assert isinstance(left_out, AlignedRows)
    assert left_out.matched is not None
    assert left_out.matched.shape == heads.shape
    assert not left_out.matched.any()
