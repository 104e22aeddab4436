"""Stored answers of a teacher with another tokenizer, as the student reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.alignment.alignment import Aligner, Alignment
from clients.data.prompt_format import PromptFormat
from protos.rows.codec import RowBlock
from student_trainer.losses import Unit
from student_trainer.teachers.other_tokenizer_store import (
    StoredPrompts,
    TokenMap,
    _map_prompts,
    mapped_rows,
    unit_rows,
)
from tests.clients.alignment import trained
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.student_trainer import tiny

TEACHER = trained.as_bytes(trained.byte_level(340))
STUDENT = trained.as_bytes(trained.byte_level(270))
STUDENT_END = 0
ALIGNER = Aligner(TEACHER, STUDENT, STUDENT_END)
TEXT = "the cat sat there. 12 + 34"


def aligned(text: str, *, ended: bool) -> tuple[Alignment, np.ndarray]:
    """Also log-probs that say which token they are of: -1, -2, ..."""
    ids = TEACHER.encode(text)
    if ended:
        ids = np.append(ids, np.int32(0))
    found = ALIGNER.align(ids, has_end=ended)
    assert found is not None
    return found, -np.arange(1, len(ids) + 1, dtype=np.float32)


def of_bytes(text: str, logprobs: np.ndarray) -> list[tuple[int, float]]:
    """Where each token of the teacher ends, and its log-prob."""
    ends = TEACHER.ends(TEACHER.encode(text)).tolist()
    return list(zip(ends, logprobs.tolist(), strict=False))


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_a_unit_has_the_sum_of_its_tokens(unit: Unit) -> None:
    found, logprobs = aligned(TEXT, ended=True)
    rows = unit_rows(found, logprobs, unit)
    assert found.reader_ids.tolist() == [*STUDENT.encode(TEXT), STUDENT_END]
    assert rows.learned.all()
    ends = [*STUDENT.ends(STUDENT.encode(TEXT)).tolist(), len(TEXT) + 1]
    teacher = [*of_bytes(TEXT, logprobs), (len(TEXT) + 1, float(logprobs[-1]))]
    borders = sorted({end for end, _ in teacher} & {*ends})
    if unit == "word":
        borders = [i for i in borders if i >= len(TEXT) or TEXT[i] == " "]
    first = 0
    for number, last in enumerate(borders):
        mine = [i for i, end in enumerate(ends) if first < end <= last]
        assert rows.word[mine].tolist() == [number] * len(mine)
        wanted = sum(q for end, q in teacher if first < end <= last)
        assert rows.token_logprobs[mine].tolist() == [wanted, *[0] * (len(mine) - 1)]
        first = last
    assert rows.word[-1] == len(borders) - 1


@pytest.mark.parametrize("unit", ["chunk", "word"])
def test_units_that_could_change_are_not_learned(unit: Unit) -> None:
    found, logprobs = aligned(TEXT, ended=False)
    rows = unit_rows(found, logprobs, unit)
    assert rows.learned[0]
    assert not rows.learned[-1]
    for number in range(int(rows.word[-1]) + 1):
        assert len(set(rows.learned[rows.word == number].tolist())) == 1
    assert not rows.learned[~found.reader_settled].any()
    assert (rows.token_logprobs[~rows.learned] == 0).all()


def prompts_of(known: dict[bytes, Any] | None = None, template: str | None = None) -> StoredPrompts:
    words = tiny.tokenizer("abcdefghijklmnopqrstuvwxyz <>")
    words.chat_template = template
    return StoredPrompts(TEACHER, words, PromptFormat(template="x{prompt}x"), known or {})


def decoded(ids: Any) -> str:
    return str(tiny.tokenizer("abcdefghijklmnopqrstuvwxyz <>").decode(ids))


def test_a_plain_prompt_is_its_text() -> None:
    """Special tokens in front, such as <s>, are left out, and the template is already there."""
    asked = TEACHER.encode("the cat")
    for ids in (asked, np.append(np.int32([0]), asked)):
        assert decoded(prompts_of()(ids)) == "the cat"
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert decoded(prompts_of(template=template)(asked)) == "<the cat>"


def test_a_prompt_in_a_chat_template_must_be_known() -> None:
    asked = TEACHER.encode("the cat")
    ids = np.concatenate([[0], asked, [0], asked]).astype(np.int32)
    assert prompts_of()(ids) is None
    mine = np.array([1, 2], np.int32)
    prompts = prompts_of({ids.tobytes(): mine})
    assert prompts(ids) is mine
    assert prompts(asked) is None


@pytest.mark.parametrize(
    ("record", "column", "said"),
    [
        ({"prompt": "1+1="}, None, "U1+1=A"),
        ({"m": TALK}, "m", "U1+1=A2<|end|>U2+2=A"),
        ({"m": TALK[:3]}, "m", "U1+1=A"),
    ],
)
def test_prompts_of_the_captured_data(
    tmp_path: Path, record: dict[str, Any], column: str | None, said: str
) -> None:
    """Both sides render them, each with its own tokenizer; an answer and what follows are cut."""
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    ours, theirs = tiny.tokenizer(CHARACTERS), tiny.tokenizer(CHARACTERS + "<|end>xyz")
    for words in (ours, theirs):
        words.chat_template = PLAIN
    changes: dict[str, Any] = {"data__messages_column": column} if column else {}
    job = tiny.offline_job(
        tiny.Material(tmp_path, tmp_path, tmp_path),
        tmp_path,
        data__tokenizer="auto",
        data__prompts=str(tmp_path / "data.jsonl"),
        **changes,
    )
    ((by, ids),) = _map_prompts(job, ours, theirs).items()
    assert theirs.decode(np.frombuffer(by, np.int32)) == said
    assert ours.decode(ids) == said


HEAD = 12
TOKENS = TokenMap.build(ALIGNER, np.array([0], np.int32))


def test_every_token_has_a_first_token_of_the_student() -> None:
    for number in range(len(TEACHER.lengths)):
        data = TEACHER.data(np.array([number]))
        begun = STUDENT.data(TOKENS.first[[number]])
        assert data.startswith(begun)
        assert bool(begun) == bool(data)
        assert TOKENS.begins[number] == (number == 0 or data[:1] in (b" ", b"\n", b"\t", b"\r"))


def test_the_weights_of_head_ids() -> None:
    """Against the definition, one token at a time."""
    found, logprobs = aligned(TEXT, ended=True)
    ids = np.append(TEACHER.encode(TEXT), np.int32(0))
    random = np.random.default_rng(0)
    words = np.flatnonzero(TOKENS.begins)
    heads = np.stack([random.permutation(len(TEACHER.lengths))[:HEAD] for _ in ids])
    heads[:, 0] = words[:: max(1, len(words) // len(ids))][: len(ids)]
    for row, token in zip(heads, ids, strict=True):  # the token is in some heads
        if token not in row and random.random() < 0.7:
            row[3] = token
    log_q = np.log(random.dirichlet(np.ones(HEAD), len(ids))).astype(np.float32)
    block = RowBlock(heads.astype(np.int32), log_q, np.zeros(len(ids), np.float32), logprobs)
    rows = mapped_rows(found, ids, block, TOKENS)
    plain = unit_rows(found, logprobs, "chunk")
    starts = [0, *TEACHER.ends(ids[:-1]).tolist()]
    own = [0, *STUDENT.ends(found.reader_ids[:-1]).tolist()]
    assert rows.weights is not None
    assert rows.tail_sample_ids is not None
    used = 0
    for i, start in enumerate(own):
        wanted = np.zeros(HEAD)
        if start in starts and (start == 0 or TEXT[start - 1] != " "):
            t = starts.index(start)
            inside = [
                j
                for j, v in enumerate(heads[t])
                if start == 0 or v == 0 or TEACHER.data(np.array([v]))[:1] in (b" ", b"\n")
            ]
            if ids[t] in heads[t][inside]:
                used += 1
                q = np.exp(log_q[t][inside].astype(float))
                wanted[inside] = q / q.sum()
                wanted -= heads[t] == ids[t]
                firsts = TOKENS.first[heads[t][inside]]
                assert rows.tail_sample_ids[i][inside].tolist() == firsts.tolist()
        assert rows.weights[i].tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
        more = float(rows.token_logprobs[i] - plain.token_logprobs[i])
        t = min(np.searchsorted(starts, start), len(starts) - 1)
        assert more == pytest.approx(float(wanted @ log_q[t]), abs=1e-5)
    assert used >= 3
