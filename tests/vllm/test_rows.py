"""The rows of the vLLM engine against those of the transformers engine: the same model, 1e-4."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock
from teacher_service.engines.base import QuerySchedule, ScoringEngine
from teacher_service.engines.hf import HfEngine
from teacher_service.engines.vllm import VllmEngine
from teacher_service.serving.self_test import run_self_test
from tests.vllm.model import BAD_TOKEN, MAX_LENGTH, VOCAB_SIZE, save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

STEP_TOKENS = 256  # so that longer sequences take several steps
BLOCK = 128  # tokens of a block of the prefix cache on CPUs


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, HfEngine]]:
    path = str(save_model(tmp_path_factory.mktemp("model"), bad_token=True))
    vllm = VllmEngine(path, max_batch_tokens=STEP_TOKENS)
    yield vllm, HfEngine(path, device="cpu")
    vllm.close()


@pytest.fixture
def vllm(engines: tuple[VllmEngine, HfEngine]) -> VllmEngine:
    return engines[0]


@pytest.fixture
def hf(engines: tuple[VllmEngine, HfEngine]) -> HfEngine:
    return engines[1]


def tokens(length: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, BAD_TOKEN, length).astype(np.int32)


def heads(
    rows: int, k: int = 6, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> np.ndarray[Any, Any]:
    """int32 [rows, k], distinct in a row."""
    order = np.argsort(np.random.default_rng(seed).random((rows, vocab_size)), axis=1)
    return order[:, :k].astype(np.int32)


def rows(engine: ScoringEngine, queries: Sequence[ScoreQuery]) -> list[RowBlock]:
    answers = engine.score(queries)
    blocks = [answer for answer in answers if isinstance(answer, RowBlock)]
    assert len(blocks) == len(queries), answers
    return blocks


def assert_same(vllm_rows: RowBlock, hf_rows: RowBlock) -> None:
    np.testing.assert_array_equal(vllm_rows.head_ids, hf_rows.head_ids)
    np.testing.assert_allclose(vllm_rows.head_logprobs, hf_rows.head_logprobs, atol=1e-4)
    np.testing.assert_allclose(vllm_rows.tail_logmass, hf_rows.tail_logmass, atol=1e-4)
    np.testing.assert_allclose(vllm_rows.token_logprobs, hf_rows.token_logprobs, atol=1e-4)


def test_a_ragged_batch_of_every_kind(vllm: VllmEngine, hf: HfEngine) -> None:
    """Both heads, several temperatures and starts; sequences of one step and of several."""
    queries = [
        query
        for seed, length in enumerate([2, 3, 33, 130, 300, 700])
        for start in sorted({1, (length + 1) // 2, length - 1})
        for temperature in (1.0, 0.7)
        for query in (
            ScoreQuery(tokens(length, seed), start, top_k=5, temperature=temperature),
            ScoreQuery(
                tokens(length, seed),
                start,
                head_ids=heads(length - start),
                temperature=temperature,
            ),
        )
    ]
    for vllm_rows, hf_rows in zip(rows(vllm, queries), rows(hf, queries), strict=True):
        assert_same(vllm_rows, hf_rows)


def test_samples_of_the_tail(vllm: VllmEngine, hf: HfEngine) -> None:
    """Drawn by the same numbers; in several steps, and with a part of the prompt in the cache."""
    query = ScoreQuery(tokens(600, seed=40), 200, top_k=8, tail_samples=4, seed=3)
    (hf_rows,) = rows(hf, [query])
    for _ in range(2):
        (vllm_rows,) = rows(vllm, [query])
        assert_same(vllm_rows, hf_rows)
        assert vllm_rows.tail_sample_ids is not None
        # A number that falls on the border of two ids may go to either.
        same = (vllm_rows.tail_sample_ids == hf_rows.tail_sample_ids).all(1)
        assert same.mean() > 0.99
        assert vllm_rows.tail_sample_logprob is not None
        assert hf_rows.tail_sample_logprob is not None
        difference = vllm_rows.tail_sample_logprob - hf_rows.tail_sample_logprob
        np.testing.assert_allclose(difference[same], 0, atol=1e-4)


def test_rows_about_the_first_ids(vllm: VllmEngine, hf: HfEngine) -> None:
    """In one batch with rows about all; the ids of the sequences are below the 400."""
    sequence = tokens(300, seed=45) % 400
    queries = [
        replace(query, vocab_size=vocab_size)
        for query in (
            ScoreQuery(sequence, 150, top_k=5),
            ScoreQuery(sequence, 1, head_ids=heads(299, vocab_size=400)),
        )
        for vocab_size in (None, 400)
    ]
    answers, expected = rows(vllm, queries), rows(hf, queries)
    for vllm_rows, hf_rows in zip(answers, expected, strict=True):
        assert_same(vllm_rows, hf_rows)
    assert (answers[0].token_logprobs < answers[1].token_logprobs).all()


@pytest.mark.parametrize("k", [1, VOCAB_SIZE])
def test_the_smallest_and_the_largest_head(vllm: VllmEngine, hf: HfEngine, k: int) -> None:
    query = ScoreQuery(tokens(20), 1, head_ids=heads(19, k))
    vllm_rows, hf_rows = rows(vllm, [query])[0], rows(hf, [query])[0]
    assert_same(vllm_rows, hf_rows)
    assert np.isneginf(vllm_rows.tail_logmass).all() == (k == VOCAB_SIZE)


def test_the_longest_sequence(vllm: VllmEngine, hf: HfEngine) -> None:
    assert vllm.info.max_length == hf.info.max_length == MAX_LENGTH
    query = ScoreQuery(tokens(MAX_LENGTH), 1, top_k=4)
    assert_same(rows(vllm, [query])[0], rows(hf, [query])[0])


def test_a_shared_prompt_is_computed_once(vllm: VllmEngine, hf: HfEngine) -> None:
    """Answers to one prompt: what they share is before every row that is wanted."""
    prompt = tokens(2 * BLOCK + 10, seed=50)
    queries = [
        ScoreQuery(np.concatenate([prompt, tokens(40, seed)]), len(prompt), top_k=5)
        for seed in range(51, 55)
    ]
    rows(vllm, queries[:1])
    before = vllm.cached_tokens
    for vllm_rows, hf_rows in zip(rows(vllm, queries[1:]), rows(hf, queries[1:]), strict=True):
        assert_same(vllm_rows, hf_rows)
    assert vllm.cached_tokens - before == 3 * 2 * BLOCK


@pytest.mark.parametrize("start", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 300, 399])
def test_a_cache_that_reaches_into_the_rows(vllm: VllmEngine, hf: HfEngine, start: int) -> None:
    """The same sequence again and again: all of its full blocks are cached, whatever is wanted."""
    again = ScoreQuery(tokens(400, seed=60), start, top_k=5)
    chosen = replace(again, top_k=None, head_ids=heads(again.rows), temperature=0.8)
    expected = rows(hf, [again, chosen])
    for _ in range(2):
        for vllm_rows, hf_rows in zip(rows(vllm, [again, chosen]), expected, strict=True):
            assert_same(vllm_rows, hf_rows)


def test_single_queries_go_past_long_ones_in_short_steps(vllm: VllmEngine, hf: HfEngine) -> None:
    """A long one takes 57 steps of 16 tokens, which vLLM would give it before any other."""
    long = [ScoreQuery(tokens(900, seed), 890, top_k=4) for seed in range(3)]
    single = [ScoreQuery(tokens(20 + seed, seed), 1, top_k=4) for seed in range(4, 8)]
    ended: list[int] = []

    async def ask(number: int, query: ScoreQuery) -> RowBlock:
        turn = QuerySchedule(number, 32, single=number >= len(long))
        block = await vllm.score_one(query, turn)
        ended.append(number)
        return block

    async def main() -> list[RowBlock]:
        return await asyncio.gather(*map(ask, range(7), [*long, *single]))

    steps = vllm.steps()
    answers = asyncio.run(main())
    count, computed = (after - before for before, after in zip(steps, vllm.steps(), strict=True))
    assert set(ended[:4]) == {3, 4, 5, 6}
    assert computed <= 32 * count
    for vllm_rows, hf_rows in zip(answers, rows(hf, [*long, *single]), strict=True):
        assert_same(vllm_rows, hf_rows)


def test_one_bad_sequence_fails_alone(vllm: VllmEngine, hf: HfEngine) -> None:
    good = ScoreQuery(tokens(300, seed=70), 1, top_k=5)
    bad = ScoreQuery(tokens(300, seed=71), 4, top_k=5)
    bad.token_ids[280] = BAD_TOKEN
    first, fault, last = vllm.score([good, bad, good])
    assert isinstance(fault, Corrupt)
    assert fault.field.startswith("token_ids[2")
    for answer in (first, last):
        assert isinstance(answer, RowBlock)
        assert_same(answer, rows(hf, [good])[0])


def test_a_bad_sequence_leaves_nothing_in_the_cache(vllm: VllmEngine, hf: HfEngine) -> None:
    """Behind another sequence it is cut in the middle of a block: its NaN spoils the end of that
    block, which a good sequence with the same prompt finds in the cache.
    """
    first = ScoreQuery(tokens(300, seed=81), 1, top_k=5)
    good = ScoreQuery(tokens(300, seed=80), 290, top_k=5)
    bad = replace(good, token_ids=good.token_ids.copy(), start=1)
    bad.token_ids[280] = BAD_TOKEN
    assert isinstance(vllm.score([first, bad])[1], Corrupt)
    assert_same(rows(vllm, [good])[0], rows(hf, [good])[0])


def test_what_it_says_of_itself(vllm: VllmEngine, hf: HfEngine) -> None:
    run_self_test(vllm)
    info = vllm.info
    assert (info.name, info.dtype, info.vocab_size) == ("vllm", "float32", VOCAB_SIZE)
    assert info.vocabulary == hf.info.vocabulary
    assert info.tokenizer_fingerprint == hf.info.tokenizer_fingerprint
    assert info.fingerprint != hf.info.fingerprint


def largest_of_width(worker: Any, width: int) -> int:
    """Number of rows of the largest weight of a worker of vLLM that has `width` columns."""
    pooler = worker.model_runner.get_model().pooler
    weights = [*worker.model_runner.get_model().parameters(), pooler._head.weight]
    return max(len(weight) for weight in weights if weight.ndim == 2 and weight.shape[1] == width)


def test_layers_and_head_shared_by_two_processes(
    hf: HfEngine,
    vllm: VllmEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor parallelism: each computes half of every layer and of the head, and has no more.

    The fingerprint is that of one process, so that replicas on 4 and on 8 GPUs share a cache.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to call a function in workers
    path = save_model(tmp_path, bad_token=True)
    shared = VllmEngine(str(path), tensor_parallel_size=2)
    try:
        assert shared.info.fingerprint == vllm.info.fingerprint
        process = shared._vllm
        ask = process._llm.collective_rpc(largest_of_width, args=(64,))
        assert process.run(ask) == [256, 256]  # of 500 ids
        queries = [
            query
            for length in (2, 40, 300)
            for token_ids in [tokens(length, seed=90) % 400]
            for query in (
                ScoreQuery(token_ids, 1, top_k=5, tail_samples=6, seed=4),
                ScoreQuery(token_ids, 1, top_k=5, temperature=0.7, vocab_size=400),
                ScoreQuery(
                    token_ids, 1, head_ids=heads(length - 1), draw_ids=heads(length - 1, 3, 1)
                ),
            )
        ]
        row_triples = zip(
            rows(shared, queries), rows(vllm, queries), rows(hf, queries), strict=True
        )
        for shared_rows, single_rows, hf_rows in row_triples:
            assert_same(shared_rows, hf_rows)
            for name in ("head_ids", "tail_sample_ids"):
                np.testing.assert_array_equal(
                    getattr(shared_rows, name), getattr(single_rows, name)
                )
            for name in ("tail_sample_logprob", "draw_logprobs"):
                if getattr(single_rows, name) is not None:
                    difference = getattr(shared_rows, name) - getattr(single_rows, name)
                    np.testing.assert_allclose(difference, 0, atol=1e-4)
        bad = ScoreQuery(tokens(300, seed=71), 4, top_k=5)
        bad.token_ids[280] = BAD_TOKEN
        good, fault = shared.score([queries[-1], bad])
        assert isinstance(good, RowBlock)
        assert isinstance(fault, Corrupt)
    finally:
        shared.close()
