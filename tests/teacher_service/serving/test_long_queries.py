"""Queries of 131,072 tokens with 64 ids a row: they cross in parts, and leave no memory behind."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.shared.process_memory import peak_bytes_of
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rpc.transport import MAX_MESSAGE_BYTES
from teacher_service.engines.fake import FakeEngine, parse_settings
from tests.teacher_service.conftest import StartTeacher

TOKENS, K, VOCAB = 131_072, 64, 128
SETTINGS = f"vocab={VOCAB},max_length={TOKENS + 1}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_peak_stays_where_it_is(start_teacher: StartTeacher) -> None:
    teacher = start_teacher("--engine", "fake", "--model", SETTINGS, launched=True)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, TOKENS + 1).astype(np.int32)
    heads = np.argsort(draw.random((TOKENS, VOCAB)), axis=1)[:, :K].astype(np.int32)
    query = ScoreQuery(tokens, 1, head_ids=heads)
    assert heads.nbytes > 7 * MAX_MESSAGE_BYTES
    expected = FakeEngine(parse_settings(SETTINGS)).score([query])[0]
    assert not isinstance(expected, Exception)
    peaks = []
    with TeacherClient(teacher.address) as client:
        for _ in range(6):
            rows = client.submit(query).result(300)
            peaks.append(peak_bytes_of(teacher.process.pid))
            assert len(rows) == TOKENS
            for name in ("head_logprobs", "token_logprobs", "tail_logmass"):
                row_column, expected_column = getattr(rows, name), getattr(expected, name)
                assert np.array_equal(row_column, expected_column.astype(row_column.dtype)), name
    print(f"peaks of the teacher: {[peak >> 20 for peak in peaks]} MiB")
    assert peaks[-1] - peaks[1] < heads.nbytes, "less than the ids of one query"
