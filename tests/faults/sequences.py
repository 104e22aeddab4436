"""Queries for fake teachers, and the answers of an undisturbed engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, FakeSettings

VOCAB = 64
FAKE = ["--engine", "fake"]
WAIT = 120.0


def fake(**settings: int) -> list[str]:
    """Return the command-line arguments of a teacher with the fake engine."""
    values = {"vocab": VOCAB, "max_length": 20_000, **settings}
    return [*FAKE, "--model", ",".join(f"{name}={value}" for name, value in values.items())]


def sequences(count: int, length: int, *, top_k: int = VOCAB, seed: int = 0) -> list[ScoreQuery]:
    """Return distinct queries; with the default top_k, 2,570 rows fill a message."""
    rng = np.random.default_rng(seed)
    return [
        ScoreQuery(rng.integers(0, VOCAB, length).astype(np.int32), 1, top_k=top_k, f32=True)
        for _ in range(count)
    ]


def expected(queries: Sequence[ScoreQuery]) -> list[RowBlock]:
    """Return the rows from an engine in this process."""
    answers = FakeEngine(FakeSettings(vocab=VOCAB, max_length=20_000)).score(queries)
    assert all(isinstance(answer, RowBlock) for answer in answers)
    return [answer for answer in answers if isinstance(answer, RowBlock)]


def assert_equal(answers: Sequence[Future[RowBlock]], expected: Sequence[RowBlock]) -> None:
    """Assert that every row is bit-identical to the expected one."""
    for answer, block in zip(answers, expected, strict=True):
        rows = answer.result(WAIT)
        np.testing.assert_array_equal(rows.head_ids, block.head_ids)
        np.testing.assert_array_equal(rows.head_logprobs, block.head_logprobs)
        np.testing.assert_array_equal(rows.tail_logmass, block.tail_logmass)
        np.testing.assert_array_equal(rows.token_logprobs, block.token_logprobs)
