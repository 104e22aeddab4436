"""The pooler of the worker, step by step as vLLM's scheduler may call it."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock
from teacher_service.engines.vllm_wire import decode_answer, encode_query
from teacher_service.head.head import Head

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

LENGTH, WIDTH, VOCAB = 21, 8, 30
STATES = torch.randn(LENGTH - 1, WIDTH, generator=torch.Generator().manual_seed(0))
HEAD = Head(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)), None)
QUERY = ScoreQuery(np.arange(LENGTH, dtype=np.int32), 4, top_k=3)
(EXPECTED,) = HEAD.score([QUERY], [STATES[3:]])


class Request:
    """One of vLLM's, with what vLLM keeps of it between steps."""

    def __init__(self, query: ScoreQuery) -> None:
        from vllm import PoolingParams
        from vllm.v1.pool.metadata import PoolingStates

        self.params = PoolingParams(task="token_embed", extra_kwargs=encode_query(query))
        self.states = PoolingStates()


def step(pooler: Any, *chunks: tuple[Request, int, int]) -> list[Any]:
    """What the pooler gives when tokens [first, end) of each request are computed together."""
    from vllm.v1.pool.metadata import PoolingMetadata

    metadata = PoolingMetadata(
        prompt_lens=torch.full((len(chunks),), LENGTH - 1),
        prompt_token_ids=None,
        prompt_token_ids_cpu=None,
        pooling_params=[request.params for request, _, _ in chunks],
        pooling_states=[request.states for request, _, _ in chunks],
    )
    counts = np.array([end - first for _, first, end in chunks])
    token_counts = torch.tensor([end for _, _, end in chunks])
    metadata.build_pooling_cursor(counts, token_counts, device=torch.device("cpu"))
    hidden = torch.cat([STATES[first:end] for _, first, end in chunks])
    return [None if out is None else decode_answer(out) for out in pooler(hidden, metadata)]


@pytest.fixture
def pooler() -> Any:
    from teacher_service.engines.vllm_worker import RowPooler

    return RowPooler(HEAD)


def assert_rows(answer: object, first: int = QUERY.start) -> None:
    """Rows `first` and on of the query."""
    assert isinstance(answer, RowBlock)
    assert isinstance(EXPECTED, RowBlock)
    expected = EXPECTED.slice(first - QUERY.start, len(EXPECTED))
    np.testing.assert_array_equal(answer.head_ids, expected.head_ids)
    np.testing.assert_allclose(answer.head_logprobs, expected.head_logprobs, atol=1e-5)
    np.testing.assert_allclose(answer.token_logprobs, expected.token_logprobs, atol=1e-5)


@pytest.mark.parametrize("cuts", [[], [1], [3], [4], [10], [2, 3, 4, 5], [19]])
def test_a_prompt_in_several_steps(pooler: Any, cuts: list[int]) -> None:
    request, bounds = Request(QUERY), [0, *cuts, LENGTH - 1]
    *before, last = [
        step(pooler, (request, first, end))[0] for first, end in itertools.pairwise(bounds)
    ]
    assert before == [None] * len(cuts)
    assert_rows(last)


def test_requests_at_different_points_of_their_prompts(pooler: Any) -> None:
    early, late = Request(QUERY), Request(QUERY)
    assert step(pooler, (late, 0, 12)) == [None]
    first, second = step(pooler, (early, 0, 9), (late, 12, 20))
    assert first is None
    assert_rows(second)
    assert_rows(step(pooler, (early, 9, 20))[0])


@pytest.mark.parametrize(("cached", "first"), [(3, 4), (4, 5), (16, 17)])
def test_cached_tokens_have_no_states(pooler: Any, cached: int, first: int) -> None:
    assert_rows(step(pooler, (Request(QUERY), cached, 20))[0], first)


@pytest.mark.parametrize("again", [0, 2, 3, 8])
def test_a_request_that_was_taken_back_starts_again(pooler: Any, again: int) -> None:
    """Under memory pressure vLLM drops a request's blocks, and computes them once more: all, or
    those that its prefix cache lost.
    """
    request = Request(QUERY)
    assert step(pooler, (request, 0, 11)) == [None]
    assert step(pooler, (request, again, 13)) == [None]
    assert_rows(step(pooler, (request, 13, 20))[0])


def test_a_gap_leaves_the_rows_after_it(pooler: Any) -> None:
    request = Request(QUERY)
    assert step(pooler, (request, 0, 8)) == [None]
    assert_rows(step(pooler, (request, 12, 20))[0], first=13)


def test_a_fault_of_one_step_is_the_answer(pooler: Any) -> None:
    good, bad = Request(QUERY), Request(QUERY)
    pooler._head = Head(torch.full((VOCAB, WIDTH), torch.nan), None)
    assert step(pooler, (bad, 0, 9)) == [None]
    pooler._head = HEAD
    first, second = step(pooler, (good, 0, 20), (bad, 9, 20))
    assert_rows(first)
    assert isinstance(second, Corrupt)
    assert second.field == "token_ids[4]"
