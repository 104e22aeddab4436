"""Rows of a teacher with another tokenizer: costs of words, and tokens without a cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clients.cross_tokenizer.alignment import Aligner
from clients.data.tokens.answers import answer_end
from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import InvalidInput, WrongState
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows, make_aligned_batch
from student_trainer.cross_tokenizer.comparison import (
    SpecialTokenPair,
    TokenizerPair,
    compare_tokenizers,
)
from student_trainer.cross_tokenizer.losses import word_advantages
from student_trainer.cross_tokenizer.teacher import (
    IMPOSSIBLE,
    OTHER_SPELLING,
    CrossTokenizerTeacher,
    aligned_rows,
)
from student_trainer.data.batch import ScoredSequence
from student_trainer.data.sequence import Rollout
from student_trainer.model.loading import vocabulary
from student_trainer.teachers.source import resolved
from student_trainer.teachers.teacher_input import teacher_prompt
from tests.clients.cross_tokenizer import trained
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN
from tests.student_trainer import tiny

STUDENT = trained.as_bytes(trained.byte_level(270))
TEACHER = trained.as_bytes(trained.byte_level(340))
ALIGNER = Aligner(STUDENT, TEACHER, 0)
TEXT = "the cat sat there. 12 + 34"


def rollout_of(ids: np.ndarray, *, ended: bool) -> Rollout:
    tokens = torch.from_numpy(np.append(np.int32([5, 6]), ids)).long()
    return Rollout(
        token_ids=tokens,
        start=2,
        head_ids=torch.zeros(len(ids), 1, dtype=torch.int32),
        token_logprobs=torch.zeros(len(ids)),
        truncated=not ended,
        answer="",
    )


def rows_of(teacher_ids: np.ndarray) -> RowBlock:
    """Return rows whose log-probs encode the token: -1, -2, ..."""
    count = len(teacher_ids)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    no_tail = np.zeros(count, np.float32)
    return RowBlock(
        np.zeros((count, 1), np.int32), np.zeros((count, 1), np.float16), no_tail, logprobs
    )


def aligned_answer(ids: np.ndarray, *, ended: bool) -> AlignedRows:
    alignment = ALIGNER.align(ids, has_end=ended)
    assert alignment is not None
    return aligned_rows(rollout_of(ids, ended=ended), alignment, rows_of(alignment.reader_ids))


def encode_text(text: str) -> np.ndarray:
    return np.append(STUDENT.encode(text), np.int32(0))


def costs_of_words(text: str) -> list[float]:
    """Return -log q of each word and of the end, one token at a time."""
    teacher = TEACHER.encode(text)
    sums, number = [], 0
    for i, token in enumerate(teacher):
        piece = TEACHER.data(np.array([token]))
        if i == 0 or piece[:1] == b" ":
            sums.append(0.0)
        number += 1
        sums[-1] += number
    return [*sums, number + 1]


def test_each_word_has_the_cost_of_its_tokens() -> None:
    rows = aligned_answer(encode_text(TEXT), ended=True)
    assert rows.learned.all()
    assert rows.spelled
    assert 0 < rows.one_to_one.mean() < 1
    word_costs = np.bincount(rows.word, weights=-rows.token_logprobs)
    assert word_costs.tolist() == costs_of_words(TEXT)


def test_another_spelling_costs_more() -> None:
    ids = encode_text(TEXT)
    letters = np.concatenate([STUDENT.encode(character) for character in " sat"])
    offset = len(STUDENT.encode("the cat"))
    respelled_ids = np.concatenate(
        [ids[:offset], letters, ids[offset + len(STUDENT.encode(" sat")) :]]
    )
    assert len(respelled_ids) > len(ids)
    rows, plain_rows = aligned_answer(respelled_ids, ended=True), aligned_answer(ids, ended=True)
    assert not rows.spelled
    assert rows.learned.all()
    added_cost = np.bincount(rows.word, weights=-rows.token_logprobs)
    added_cost -= np.bincount(plain_rows.word, weights=-plain_rows.token_logprobs)
    assert added_cost.tolist() == [0, 0, OTHER_SPELLING, 0, 0, 0, 0, 0]


def test_the_last_tokens_of_a_truncated_answer_have_no_cost() -> None:
    ids = STUDENT.encode(TEXT)
    rows = aligned_answer(ids, ended=False)
    alignment = ALIGNER.align(ids, has_end=False)
    assert alignment is not None
    assert rows.learned.tolist() == alignment.settled.tolist()
    assert not rows.learned[-1]
    settled_bytes = TEACHER.data(alignment.reader_ids[alignment.reader_settled])
    assert STUDENT.data(ids[rows.learned]) == settled_bytes
    total = sum(i + 1 for i, is_settled in enumerate(alignment.reader_settled) if is_settled)
    assert -rows.token_logprobs[rows.learned].sum() == total


def test_a_special_token_within_an_answer_is_nearly_impossible() -> None:
    ids = np.concatenate([STUDENT.encode("the cat sat"), np.int32([0]), encode_text(" on")])
    rows = aligned_answer(ids, ended=True)
    at = len(STUDENT.encode("the cat sat"))
    assert rows.learned[at]
    assert rows.token_logprobs[at] == IMPOSSIBLE
    assert not rows.learned[at + 1 :].any()
    word, costs = torch.from_numpy(rows.word), -torch.from_numpy(rows.token_logprobs).double()
    costs = torch.where(torch.from_numpy(rows.learned), costs, 0.0)
    none = torch.zeros(len(costs), dtype=torch.long)
    before = word_advantages(costs, word, none, "answer")[:at]
    assert bool((before >= -IMPOSSIBLE).all())


class AnsweringClient:
    """A client that answers at once, and records its queries."""

    def __init__(self) -> None:
        self.queries: list[ScoreQuery] = []

    def submit(self, query: ScoreQuery) -> Any:
        self.queries.append(query)
        return resolved(rows_of(query.token_ids[query.start :]))


def test_what_the_teacher_is_asked() -> None:
    client: Any = AnsweringClient()
    before = np.array([7, 8, 9], np.int32)
    options: dict[str, Any] = {"temperature": 0.5, "max_length": 40}
    teacher = CrossTokenizerTeacher(client, ALIGNER, lambda _: torch.from_numpy(before), **options)
    rows = teacher.score(rollout_of(encode_text(TEXT), ended=True)).result()
    [query] = client.queries
    assert query.token_ids.tolist() == [7, 8, 9, *TEACHER.encode(TEXT), 0]
    assert (query.start, query.top_k, query.head_ids, query.temperature) == (3, 1, None, 0.5)
    assert isinstance(rows, AlignedRows)
    assert rows.learned.all()
    rows = teacher.score(rollout_of(encode_text(TEXT * 9), ended=True)).result()
    assert len(client.queries) == 1
    assert isinstance(rows, AlignedRows)
    assert not rows.learned.any()


def test_words_of_several_answers_have_numbers_of_their_own() -> None:
    answers = [encode_text(TEXT), encode_text("the dog"), encode_text("a")]
    items = [
        ScoredSequence(rollout_of(a, ended=True), aligned_answer(a, ended=True)) for a in answers
    ]
    batch = make_aligned_batch(items, torch.device("cpu"), "padded")
    pairs = set(zip(batch.sequence.tolist(), batch.word.tolist(), strict=True))
    assert len(pairs) == len({word for _, word in pairs})
    assert int(batch.word.max()) < len(batch)
    empty = batch.without_rows()
    assert (len(empty), len(empty.word), len(empty.spelled)) == (0, 0, 0)


def test_the_teacher_reads_its_own_template() -> None:
    teacher_words = tiny.tokenizer(CHARACTERS)
    teacher_words.chat_template = PLAIN
    job = tiny.job(tiny.Material(Path(), Path(), Path()), teacher__tokenizer="auto")
    rollout = rollout_of(encode_text("a"), ended=True)
    object.__setattr__(rollout, "text", "1+1=")
    assert teacher_words.decode(teacher_prompt(job, teacher_words)(rollout)) == "U1+1=A"


def test_the_end_of_an_answer() -> None:
    words = tiny.tokenizer(CHARACTERS)
    assert answer_end(words) == words.eos_token_id
    words.chat_template = PLAIN
    assert answer_end(words) == words.eos_token_id
    words = tiny.tokenizer(CHARACTERS + "qz|")
    words.add_special_tokens({"additional_special_tokens": ["|"]})
    words.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    assert answer_end(words) == words.convert_tokens_to_ids("|")


def connected_teacher(model: str, words: Any) -> dict[str, Any]:
    info = SimpleNamespace(model=model, tokenizer_fingerprint=compute_fingerprint(words))
    return {"": SimpleNamespace(info=info, label="teacher")}


def compute_fingerprint(words: Any) -> str:
    return tokenizer_fingerprint(vocabulary(words))


def test_whether_the_tokenizer_is_another_one(tmp_path: Path) -> None:
    student_words, teacher_words = tiny.tokenizer(), tiny.tokenizer(CHARACTERS)
    material = tiny.Material(tmp_path, tmp_path, tmp_path)
    teacher_path = str(tmp_path / "theirs")
    teacher_words.save_pretrained(teacher_path)

    def pair(tokenizer: str, model: str, words: Any) -> TokenizerPair | SpecialTokenPair | None:
        job = tiny.job(material, teacher__tokenizer=tokenizer)
        return compare_tokenizers(job, connected_teacher(model, words), student_words)

    assert pair("same", teacher_path, teacher_words) is None
    assert pair("auto", "nowhere", student_words) is None
    for tokenizer, model in (("auto", teacher_path), (teacher_path, "nowhere")):
        tokenizer_pair = pair(tokenizer, model, teacher_words)
        assert isinstance(tokenizer_pair, TokenizerPair)
        assert tokenizer_pair.tokens == len(student_words)
        assert (
            tokenizer_pair.aligner.reader.data(np.array(teacher_words("1+U")["input_ids"]))
            == b"1+U"
        )
    missing_path = str(tmp_path / "away")
    with pytest.raises(
        InvalidInput, match=f"no tokenizer can be loaded from '{missing_path}'"
    ) as caught:
        pair("auto", missing_path, teacher_words)
    assert caught.value.field == "teacher.tokenizer"
    with pytest.raises(WrongState, match="is not that of the teacher"):
        pair(teacher_path, "nowhere", tiny.tokenizer(CHARACTERS + "z"))
