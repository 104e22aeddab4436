"""Rows about the first ids: those of a model without the logits of the others."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.head.head import Head

H, V, WIDE = 16, 320, 336
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, 12).astype(np.int32)
HEADS = np.stack([RNG.permutation(V)[:5] for _ in range(9)]).astype(np.int32)
DRAWS = RNG.integers(0, V, (9, 4)).astype(np.int32)
QUERIES = {
    "top_k": ScoreQuery(TOKENS, 3, top_k=7, temperature=0.8),
    "all of them": ScoreQuery(TOKENS, 3, top_k=V),
    "head ids and draws": ScoreQuery(TOKENS, 3, head_ids=HEADS, draw_ids=DRAWS),
    "tail samples": ScoreQuery(TOKENS, 3, top_k=2, tail_samples=9, seed=4),
}


def narrowed(query: ScoreQuery) -> ScoreQuery:
    return ScoreQuery(**{**vars(query), "vocab_size": V})


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """States, a weight whose padding has as much mass as all else, and a bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDE, H, generator=generator) / 2
    weight[V:] *= 2
    states = torch.randn(9, H, generator=generator)
    return states, weight, torch.randn(WIDE, generator=generator)


def assert_same(rows: RowBlock, expected: RowBlock) -> None:
    for column in fields(RowBlock):
        row_column, expected_column = getattr(rows, column.name), getattr(expected, column.name)
        assert (row_column is None) == (expected_column is None)
        if row_column is not None:
            assert_allclose(row_column, expected_column, rtol=1e-6, atol=2e-6, err_msg=column.name)


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("product", [False, True])
def test_rows_are_those_of_the_narrow_head(name: str, product: bool) -> None:
    """Also with a product of another kind, such as vLLM's, which computes all columns."""
    states, weight, bias = weights()
    faster = (lambda hidden: hidden @ weight.T) if product else None
    (narrowed_rows,) = Head(weight, bias, faster).score([narrowed(QUERIES[name])], [states])
    (expected,) = Head(weight[:V], bias[:V]).score([QUERIES[name]], [states])
    assert isinstance(narrowed_rows, RowBlock)
    assert isinstance(expected, RowBlock)
    assert_same(narrowed_rows, expected)
    (full_rows,) = Head(weight, bias).score([QUERIES[name]], [states])
    assert isinstance(full_rows, RowBlock)
    assert (full_rows.token_logprobs < narrowed_rows.token_logprobs).all()
    assert np.abs(full_rows.token_logprobs - narrowed_rows.token_logprobs).max() > 0.1


def test_both_kinds_of_queries_in_one_batch() -> None:
    states, weight, bias = weights()
    head, query = Head(weight, bias), QUERIES["top_k"]
    alone = [head.score([single_query], [states])[0] for single_query in (query, narrowed(query))]
    together = head.score([query, narrowed(query)], [states, states])
    for single_query, single_rows in zip(together, alone, strict=True):
        assert isinstance(single_query, RowBlock)
        assert isinstance(single_rows, RowBlock)
        assert_same(single_query, single_rows)


@pytest.mark.parametrize("name", QUERIES)
def test_the_fake_engine_narrows_as_well(name: str) -> None:
    """Its logits are a hash of the prefix and the id, so they are those of a narrow one."""
    wide, narrow = (FakeEngine(FakeSettings(vocab=vocab)) for vocab in (WIDE, V))
    (rows,), (expected,) = wide.score([narrowed(QUERIES[name])]), narrow.score([QUERIES[name]])
    assert isinstance(rows, RowBlock)
    assert isinstance(expected, RowBlock)
    assert_same(rows, expected)
