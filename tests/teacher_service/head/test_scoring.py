"""The scoring head against log_softmax over the whole vocabulary in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from protos.errors import Corrupt
from teacher_service.head.scoring import ScoredRows, score_hidden

N, H, V = 23, 16, 120


def case(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator) * scale
    weight = torch.randn(V, H, generator=generator)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def oracle(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, head_ids: Tensor, temperature: float
) -> ScoredRows:
    logits = hidden.double() @ weight.double().T / temperature
    logprobs = logits.log_softmax(-1)
    outside = torch.ones_like(logprobs, dtype=torch.bool).scatter_(-1, head_ids, False)
    return ScoredRows(
        head_ids,
        logprobs.gather(-1, head_ids),
        logprobs.masked_fill(~outside, -torch.inf).logsumexp(-1),
        logprobs.gather(-1, token_ids[:, None])[:, 0],
    )


def assert_close(actual: ScoredRows, expected: ScoredRows, rtol: float = 2e-6) -> None:
    for name in ("head_logprobs", "tail_logmass", "token_logprobs"):
        assert getattr(actual, name).dtype is torch.float32
        torch.testing.assert_close(
            getattr(actual, name).double(), getattr(expected, name), rtol=rtol, atol=1e-5
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("k", [1, 7, V])
def test_teacher_head(k: int, temperature: float) -> None:
    hidden, weight, tokens = case()
    scored = score_hidden(
        hidden, weight, token_ids=tokens, top_k=k, head_ids=None, temperature=temperature
    )
    top = (hidden.double() @ weight.double().T).topk(k, -1).indices
    assert torch.equal(scored.head_ids.sort(-1).values, top.sort(-1).values)
    assert_close(scored, oracle(hidden, weight, tokens, scored.head_ids, temperature))
    if k == V:
        assert scored.tail_logmass.isneginf().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_student_head_and_bias(temperature: float) -> None:
    hidden, weight, tokens = case()
    head = torch.stack([torch.randperm(V)[:9] for _ in range(N)])
    bias = torch.randn(V)
    scored = score_hidden(
        hidden,
        weight,
        bias=bias,
        token_ids=tokens,
        top_k=None,
        head_ids=head,
        temperature=temperature,
    )
    with_bias = torch.cat([hidden, torch.ones(N, 1)], 1), torch.cat([weight, bias[:, None]], 1)
    assert_close(scored, oracle(*with_bias, tokens, head, temperature))


@pytest.mark.parametrize("k", [1, 2, 7, 19, 30])
def test_a_vocabulary_searched_in_groups(k: int) -> None:
    """5,003 ids: 78 groups of 64 and 11 more; the largest sit side by side and at the end."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(6, 5003, generator=generator)
    logits[0, 640:704] += 20  # all in one group
    logits[1, 4990:] += 20  # across the last whole group and the rest
    logits[2, ::64] += 20  # one in each group
    logits[3] = logits[3].round(decimals=1)  # ties
    logits[4, 100:] = -torch.inf
    logits[5] = 1.0
    scored = score_rows_of(logits, torch.arange(6), k)
    assert all(len(set(row.tolist())) == k for row in scored.head_ids)
    top_logits, expected = logits.gather(-1, scored.head_ids), logits.topk(k, -1).values
    assert torch.equal(top_logits, expected)
    exact = logits.double().log_softmax(-1)
    outside = torch.ones_like(exact, dtype=torch.bool).scatter_(-1, scored.head_ids, False)
    tail = exact.masked_fill(~outside, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(scored.tail_logmass.double(), tail, rtol=2e-6, atol=1e-5)
    heads = exact.gather(-1, scored.head_ids)
    torch.testing.assert_close(scored.head_logprobs.double(), heads, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 333, 5002])
def test_one_bad_logit_among_thousands_is_found(bad: float, at: int) -> None:
    logits = torch.randn(1, 5003)
    logits[0, at] = bad
    with pytest.raises(Corrupt):
        score_rows_of(logits, torch.tensor([7]), 8)


def test_chunks_do_not_matter() -> None:
    hidden, weight, tokens = case()
    single_chunk, many_chunks = (
        score_hidden(
            hidden,
            weight,
            token_ids=tokens,
            top_k=8,
            head_ids=None,
            temperature=1.0,
            chunk_rows=rows,
        )
        for rows in (None, 5)
    )
    assert torch.equal(single_chunk.head_ids, many_chunks.head_ids)
    torch.testing.assert_close(
        single_chunk.tail_logmass, many_chunks.tail_logmass, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        single_chunk.head_logprobs, many_chunks.head_logprobs, rtol=1e-6, atol=1e-6
    )


def test_a_tiny_tail_keeps_its_digits() -> None:
    """1 - sum(head) would be 0 or 6e-8 here; the tail holds 1e-12 of the mass."""
    logits = torch.full((1, V), float(np.log(1e-12 / (V - 1))))
    logits[0, 0] = 0.0
    scored = score_hidden(
        logits,
        torch.eye(V),
        token_ids=torch.tensor([5]),
        top_k=1,
        head_ids=None,
        temperature=1.0,
    )
    expected = oracle(logits, torch.eye(V), torch.tensor([5]), scored.head_ids, 1.0)
    mass, exact = scored.tail_logmass.double().exp(), expected.tail_logmass.exp()
    assert abs(mass / exact - 1) < 1e-5


def test_masked_vocabulary() -> None:
    logits = torch.randn(2, V)
    logits[:, 10:] = -torch.inf
    scored = score_rows_of(logits, torch.tensor([3, 50]), 12)
    assert scored.head_logprobs[:, :10].isfinite().all()
    assert scored.head_logprobs[:, 10:].isneginf().all()
    assert scored.tail_logmass.isneginf().all()
    assert scored.token_logprobs[0].isfinite()
    assert scored.token_logprobs[1].isneginf()


def score_rows_of(logits: Tensor, token_ids: Tensor, k: int) -> ScoredRows:
    """Any logits, -inf included: as the bias of a row scored alone."""
    parts = [
        score_hidden(
            torch.zeros(1, 1),
            torch.zeros(logits.shape[1], 1),
            bias=row,
            token_ids=token,
            top_k=k,
            head_ids=None,
            temperature=1.0,
        )
        for row, token in zip(logits, token_ids.split(1), strict=True)
    ]
    return ScoredRows(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("head_ids", "head_logprobs", "tail_logmass", "token_logprobs")
        )
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_named(bad: float) -> None:
    hidden, weight, tokens = case()
    hidden[11, 3] = bad
    with pytest.raises(Corrupt, match="position 111 ") as caught:
        score_hidden(
            hidden,
            weight,
            token_ids=tokens,
            top_k=4,
            head_ids=None,
            temperature=1.0,
            chunk_rows=5,
            first_position=100,
        )
    assert caught.value.field == "token_ids[111]"
