"""The endpoint engine, made for vLLM's server, in front of a teacher's HTTP front."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.endpoint import EndpointEngine
from teacher_service.engines.hf import HfEngine
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.http.asking import Site
from tests.teacher_service.tiny_model import VOCAB_SIZE


def chosen(ids: NDArray[np.int32], k: int, draws: int) -> ScoreQuery:
    """A query for ids that a student chose; the sampled token may be among them."""
    start = 1 + len(ids) // 3
    order = np.argsort(np.random.default_rng(k).random((len(ids) - start, VOCAB_SIZE)), axis=1)
    heads, draw_ids = np.split(order[:, : k + draws].astype(np.int32), [k], axis=1)
    return ScoreQuery(ids, start, head_ids=heads, draw_ids=draw_ids if draws else None)


@pytest.fixture
def site(start_teacher: StartTeacher, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("DISTILL_ENDPOINT_KEY", raising=False)
    options = ("--model", str(tiny_model), "--dtype", "float32", "--device", "cpu")
    return Site(start_teacher(*options, "--http-port", "0", "--max-top-k", "32"))


def test_the_rows_of_the_model(site: Site, tiny_model: Path) -> None:
    engine = EndpointEngine(
        site.url,
        tokenizer=str(tiny_model),
        served_model="",
        max_top_k=1024,
        step_tokens=4096,
    )
    try:
        assert engine.info.vocab_size == VOCAB_SIZE
        assert engine.info.limits.max_top_k == 32
        assert engine.info.limits.max_chosen_ids == 31  # and the sampled token
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (2, 40, 300)]
        queries = [
            ScoreQuery(token_ids, 1 + len(token_ids) // 3, top_k=k)
            for token_ids in ids
            for k in (1, 32)
        ]
        queries += [
            chosen(token_ids, k, draws) for token_ids in ids for k, draws in ((1, 0), (8, 23))
        ]
        blocks = engine.score(queries)
    finally:
        engine.close()
    for block, expected in zip(
        blocks, HfEngine(str(tiny_model), device="cpu").score(queries), strict=True
    ):
        assert isinstance(block, RowBlock)
        assert isinstance(expected, RowBlock)
        np.testing.assert_array_equal(block.head_ids, expected.head_ids)
        np.testing.assert_allclose(block.head_logprobs, expected.head_logprobs, atol=1e-5)
        if expected.draw_logprobs is not None:
            assert block.draw_logprobs is not None
            np.testing.assert_allclose(block.draw_logprobs, expected.draw_logprobs, atol=0.01)
        np.testing.assert_allclose(block.token_logprobs, expected.token_logprobs, atol=1e-5)
