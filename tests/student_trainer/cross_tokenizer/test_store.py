"""Stored answers of a teacher with another tokenizer, as the student reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.cross_tokenizer.alignment import Aligner, Alignment
from clients.data.prompt_format import PromptFormat
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.losses import Unit
from student_trainer.cross_tokenizer.store import (
    StoredPrompts,
    TokenMap,
    _map_prompts,
    mapped_rows,
    unit_rows,
)
from tests.clients.cross_tokenizer import trained
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.student_trainer import tiny

TEACHER = trained.as_bytes(trained.byte_level(340))
STUDENT = trained.as_bytes(trained.byte_level(270))
STUDENT_END = 0
ALIGNER = Aligner(TEACHER, STUDENT, STUDENT_END)
TEXT = "the cat sat there. 12 + 34"


def align_text(text: str, *, ended: bool) -> tuple[Alignment, np.ndarray]:
    """Return the alignment, and log-probs that encode the token: -1, -2, ..."""
    ids = TEACHER.encode(text)
    if ended:
        ids = np.append(ids, np.int32(0))
    alignment = ALIGNER.align(ids, has_end=ended)
    assert alignment is not None
    return alignment, -np.arange(1, len(ids) + 1, dtype=np.float32)


def token_ends(text: str, logprobs: np.ndarray) -> list[tuple[int, float]]:
    """Return the end and the log-prob of each token of the teacher."""
    ends = TEACHER.ends(TEACHER.encode(text)).tolist()
    return list(zip(ends, logprobs.tolist(), strict=False))


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_a_unit_has_the_sum_of_its_tokens(unit: Unit) -> None:
    alignment, logprobs = align_text(TEXT, ended=True)
    rows = unit_rows(alignment, logprobs, unit)
    assert alignment.reader_ids.tolist() == [*STUDENT.encode(TEXT), STUDENT_END]
    assert rows.learned.all()
    ends = [*STUDENT.ends(STUDENT.encode(TEXT)).tolist(), len(TEXT) + 1]
    teacher = [*token_ends(TEXT, logprobs), (len(TEXT) + 1, float(logprobs[-1]))]
    borders = sorted({end for end, _ in teacher} & {*ends})
    if unit == "word":
        borders = [i for i in borders if i >= len(TEXT) or TEXT[i] == " "]
    first = 0
    for number, last in enumerate(borders):
        unit_tokens = [i for i, end in enumerate(ends) if first < end <= last]
        assert rows.word[unit_tokens].tolist() == [number] * len(unit_tokens)
        expected_logprob = sum(q for end, q in teacher if first < end <= last)
        assert rows.token_logprobs[unit_tokens].tolist() == [
            expected_logprob,
            *[0] * (len(unit_tokens) - 1),
        ]
        first = last
    assert rows.word[-1] == len(borders) - 1


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_units_that_could_change_are_not_learned(unit: Unit) -> None:
    alignment, logprobs = align_text(TEXT, ended=False)
    rows = unit_rows(alignment, logprobs, unit)
    assert rows.learned[0]
    assert not rows.learned[-1]
    for number in range(int(rows.word[-1]) + 1):
        assert len(set(rows.learned[rows.word == number].tolist())) == 1
    assert not rows.learned[~alignment.reader_settled].any()
    assert (rows.token_logprobs[~rows.learned] == 0).all()


def prompts_of(
    known_prompts: dict[bytes, Any] | None = None, template: str | None = None
) -> StoredPrompts:
    words = tiny.tokenizer("abcdefghijklmnopqrstuvwxyz <>")
    words.chat_template = template
    return StoredPrompts(TEACHER, words, PromptFormat(template="x{prompt}x"), known_prompts or {})


def decode_ids(ids: Any) -> str:
    return str(tiny.tokenizer("abcdefghijklmnopqrstuvwxyz <>").decode(ids))


def test_a_plain_prompt_is_its_text() -> None:
    """Leading special tokens, such as <s>, are dropped, and the template is not applied again."""
    prompt_ids = TEACHER.encode("the cat")
    for ids in (prompt_ids, np.append(np.int32([0]), prompt_ids)):
        assert decode_ids(prompts_of()(ids)) == "the cat"
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert decode_ids(prompts_of(template=template)(prompt_ids)) == "<the cat>"


def test_a_prompt_in_a_chat_template_must_be_known() -> None:
    plain_ids = TEACHER.encode("the cat")
    ids = np.concatenate([[0], plain_ids, [0], plain_ids]).astype(np.int32)
    assert prompts_of()(ids) is None
    student_ids = np.array([1, 2], np.int32)
    prompts = prompts_of({ids.tobytes(): student_ids})
    assert prompts(ids) is student_ids
    assert prompts(plain_ids) is None


@pytest.mark.parametrize(
    ("record", "column", "text"),
    [
        ({"prompt": "1+1="}, None, "U1+1=A"),
        ({"m": TALK}, "m", "U1+1=A2<|end|>U2+2=A"),
        ({"m": TALK[:3]}, "m", "U1+1=A"),
    ],
)
def test_prompts_of_the_captured_data(
    tmp_path: Path, record: dict[str, Any], column: str | None, text: str
) -> None:
    """Both render prompts with their own tokenizers; the answer and later turns are cut."""
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    student_words, teacher_words = (
        tiny.tokenizer(CHARACTERS),
        tiny.tokenizer(CHARACTERS + "<|end>xyz"),
    )
    for words in (student_words, teacher_words):
        words.chat_template = PLAIN
    changes: dict[str, Any] = {"data__messages_column": column} if column else {}
    job = tiny.offline_job(
        tiny.Material(tmp_path, tmp_path, tmp_path),
        tmp_path,
        data__tokenizer="auto",
        data__prompts=str(tmp_path / "data.jsonl"),
        **changes,
    )
    ((teacher_bytes, ids),) = _map_prompts(job, student_words, teacher_words).items()
    assert teacher_words.decode(np.frombuffer(teacher_bytes, np.int32)) == text
    assert student_words.decode(ids) == text


HEAD = 12
TOKENS = TokenMap.build(ALIGNER, np.array([0], np.int32))


def test_every_token_has_a_first_token_of_the_student() -> None:
    for number in range(len(TEACHER.lengths)):
        data = TEACHER.data(np.array([number]))
        first_bytes = STUDENT.data(TOKENS.first[[number]])
        assert data.startswith(first_bytes)
        assert bool(first_bytes) == bool(data)
        assert TOKENS.begins[number] == (number == 0 or data[:1] in (b" ", b"\n", b"\t", b"\r"))


def test_the_weights_of_head_ids() -> None:
    """Compared with the definition, one token at a time."""
    alignment, logprobs = align_text(TEXT, ended=True)
    ids = np.append(TEACHER.encode(TEXT), np.int32(0))
    random = np.random.default_rng(0)
    words = np.flatnonzero(TOKENS.begins)
    heads = np.stack([random.permutation(len(TEACHER.lengths))[:HEAD] for _ in ids])
    heads[:, 0] = words[:: max(1, len(words) // len(ids))][: len(ids)]
    for row, token in zip(heads, ids, strict=True):  # put the token into some heads
        if token not in row and random.random() < 0.7:
            row[3] = token
    log_q = np.log(random.dirichlet(np.ones(HEAD), len(ids))).astype(np.float32)
    block = RowBlock(heads.astype(np.int32), log_q, np.zeros(len(ids), np.float32), logprobs)
    rows = mapped_rows(alignment, ids, block, TOKENS)
    plain_rows = unit_rows(alignment, logprobs, "chunk")
    starts = [0, *TEACHER.ends(ids[:-1]).tolist()]
    student_starts = [0, *STUDENT.ends(alignment.reader_ids[:-1]).tolist()]
    assert rows.weights is not None
    assert rows.tail_sample_ids is not None
    weighted_count = 0
    for i, start in enumerate(student_starts):
        expected_weights = np.zeros(HEAD)
        if start in starts and (start == 0 or TEXT[start - 1] != " "):
            t = starts.index(start)
            word_columns = [
                j
                for j, v in enumerate(heads[t])
                if start == 0 or v == 0 or TEACHER.data(np.array([v]))[:1] in (b" ", b"\n")
            ]
            if ids[t] in heads[t][word_columns]:
                weighted_count += 1
                q = np.exp(log_q[t][word_columns].astype(float))
                expected_weights[word_columns] = q / q.sum()
                expected_weights -= heads[t] == ids[t]
                firsts = TOKENS.first[heads[t][word_columns]]
                assert rows.tail_sample_ids[i][word_columns].tolist() == firsts.tolist()
        assert rows.weights[i].tolist() == pytest.approx(expected_weights.tolist(), abs=1e-6)
        added_logprob = float(rows.token_logprobs[i] - plain_rows.token_logprobs[i])
        t = min(np.searchsorted(starts, start), len(starts) - 1)
        assert added_logprob == pytest.approx(float(expected_weights @ log_q[t]), abs=1e-5)
    assert weighted_count >= 3
