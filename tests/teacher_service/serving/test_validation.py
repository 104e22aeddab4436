"""Every wrong field of a request is named, with a remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery, request_of, row_key
from protos import teacher_pb2
from protos.errors import InvalidInput
from teacher_service.serving.validation import RequestLimits, parse_request

LIMITS = RequestLimits(vocab_size=100, max_length=10, max_top_k=4)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def request(**changes: Any) -> teacher_pb2.ScoreRequest:
    good = {"token_ids": int32(5, 6, 7, 8), "start": 2, "temperature": 1.0, "top_k": 3}
    if "head_ids" in changes:
        del good["top_k"]
    return teacher_pb2.ScoreRequest(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": "x" * 201}, "request_id"),
        ({"token_ids": b""}, "token_ids"),
        ({"token_ids": int32(5)}, "token_ids"),
        ({"token_ids": int32(*range(11))}, "token_ids"),
        ({"token_ids": b"12345"}, "token_ids"),
        ({"token_ids": int32(5, 100, 7)}, "token_ids[1]"),
        ({"token_ids": int32(5, 6, -1)}, "token_ids[2]"),
        ({"start": 0}, "start"),
        ({"start": 4}, "start"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5}, "top_k"),
        ({"head_ids": b""}, "head_ids"),
        ({"head_ids": b"123"}, "head_ids"),
        ({"head_ids": int32(1, 2, 3)}, "head_ids"),
        ({"head_ids": int32(*range(10))}, "head_ids"),
        ({"head_ids": int32(1, 2, 3, 100)}, "head_ids[3]"),
        ({"head_ids": int32(1, 2, 7, 7)}, "head_ids[1]"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 1e-5}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"tail_samples": 257}, "tail_samples"),
        ({"tail_samples": 2**32 - 1}, "tail_samples"),
        ({"tail_samples": 2, "top_k": 5}, "top_k"),
        ({"tail_samples": 2, "head_ids": b""}, "head_ids"),
        ({"next_position": 1}, "next_position"),
        ({"next_position": 4}, "next_position"),
        ({"vocab_size": 101}, "vocab_size"),
        ({"vocab_size": 2**32 - 1}, "vocab_size"),
        ({"vocab_size": 8}, "token_ids[3]"),
        ({"vocab_size": 9, "head_ids": int32(1, 8, 2, 9)}, "head_ids[3]"),
        ({"vocab_size": 9, "draw_ids": int32(8, 9)}, "draw_ids[1]"),
        ({"vocab_size": 9, "token_ids": int32(0, 1, 1, 0), "top_k": 5}, "top_k"),
    ],
)
def test_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_request(request(**changes), LIMITS)
    assert caught.value.field == field
    assert caught.value.hint


def test_no_head_at_all() -> None:
    message = request()
    message.ClearField("top_k")
    with pytest.raises(InvalidInput, match="neither"):
        parse_request(message, LIMITS)


def test_a_request_and_its_query_are_the_same() -> None:
    tokens = np.array([5, 6, 7, 8], np.int32)
    head = np.array([[1, 2], [3, 4]], np.int32)
    for query in (
        ScoreQuery(tokens, 2, top_k=4, temperature=0.7),
        ScoreQuery(tokens, 2, head_ids=head, f32=True),
        ScoreQuery(tokens, 2, head_ids=head, tail_samples=256, seed=2**64 - 1),
        ScoreQuery(tokens, 2, top_k=0, tail_samples=1),
        ScoreQuery(tokens, 2, top_k=1, vocab_size=9),
    ):
        back = parse_request(request_of(query, "1"), LIMITS)
        assert row_key("teacher", 0, back) == row_key("teacher", 0, query)


def test_a_query_about_all_logits_has_one_key() -> None:
    query = parse_request(request(vocab_size=100), LIMITS)
    assert query.vocab_size is None
    assert row_key("teacher", 0, query) == row_key("teacher", 0, parse_request(request(), LIMITS))


def test_fewer_ids_allow_fewer_head_ids() -> None:
    limits = RequestLimits(vocab_size=100, max_length=10, max_top_k=50)
    few = {"vocab_size": 9, "token_ids": int32(0, 1, 1, 0)}
    assert parse_request(request(**few, top_k=9), limits).top_k == 9
    with pytest.raises(InvalidInput, match="k must be 1 to 9, got 10"):
        parse_request(request(**few, top_k=10), limits)


def test_every_input_of_the_rows_is_in_the_key() -> None:
    tokens = np.array([5, 6, 7, 8], np.int32)
    head = np.array([[1], [3]], np.int32)
    queries = [
        ScoreQuery(tokens, 2, top_k=1),
        ScoreQuery(tokens, 1, top_k=1),
        ScoreQuery(tokens, 2, top_k=2),
        ScoreQuery(tokens, 2, head_ids=head),
        ScoreQuery(tokens, 2, head_ids=head + 1),
        ScoreQuery(tokens, 2, top_k=1, temperature=0.9),
        ScoreQuery(tokens, 2, top_k=1, f32=True),
        ScoreQuery(tokens[::-1].copy(), 2, top_k=1),
        ScoreQuery(tokens, 2, top_k=1, tail_samples=1),
        ScoreQuery(tokens, 2, top_k=1, tail_samples=2),
        ScoreQuery(tokens, 2, top_k=1, tail_samples=2, seed=1),
        ScoreQuery(tokens, 2, top_k=1, vocab_size=9),
        ScoreQuery(tokens, 2, top_k=1, vocab_size=10),
    ]
    keys = {row_key("teacher", 0, query) for query in queries}
    keys |= {row_key("other", 0, queries[0]), row_key("teacher", 1, queries[0])}
    assert len(keys) == len(queries) + 2
    # Where nothing is drawn the seed is no input.
    assert row_key("teacher", 0, ScoreQuery(tokens, 2, top_k=1, seed=1)) in keys


def test_a_query_has_one_kind_of_head() -> None:
    tokens = np.array([5, 6], np.int32)
    with pytest.raises(InvalidInput):
        ScoreQuery(tokens, 1)
    with pytest.raises(InvalidInput):
        ScoreQuery(tokens, 1, top_k=1, head_ids=np.zeros((1, 1), np.int32))
