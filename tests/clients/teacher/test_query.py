"""A ScoreQuery refuses arrays of wrong shapes or types before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery, row_key
from protos.errors import InvalidInput

TOKENS = np.array([5, 1, 4, 2], np.int32)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"token_ids": [5, 1, 4, 2]}, "token_ids", r"\[T\], got list"),
        ({"token_ids": TOKENS[None]}, "token_ids", r"\[T\], got int32 \[1, 4\]"),
        ({"token_ids": TOKENS.astype(np.float32)}, "token_ids", r"got float32 \[4\]"),
        ({"token_ids": TOKENS[:1]}, "start", r"1 to 0 for 1 tokens"),
        ({"start": 0}, "start", r"1 to 3 for 4 tokens, got 0"),
        ({"start": 4}, "start", r"1 to 3 for 4 tokens, got 4"),
        ({"top_k": None, "head_ids": TOKENS}, "head_ids", r"\[T - start, n\], got int32 \[4\]"),
        ({"top_k": None, "head_ids": np.zeros((4, 2), np.int32)}, "head_ids", r"has 4 rows, .* 3"),
        ({"draw_ids": np.zeros((2, 2), np.int32)}, "draw_ids", r"has 2 rows, .* 3"),
        ({"draw_ids": np.zeros((3, 2), np.float64)}, "draw_ids", r"got float64 \[3, 2\]"),
    ],
)
def test_a_wrong_shape_is_refused(changes: dict[str, Any], field: str, message: str) -> None:
    fields: dict[str, Any] = {"token_ids": TOKENS, "start": 1, "top_k": 2} | changes
    with pytest.raises(InvalidInput, match=message) as caught:
        ScoreQuery(**fields)
    assert caught.value.field == field
    assert caught.value.hint


def test_the_documented_shapes_are_taken() -> None:
    query = ScoreQuery(
        TOKENS, 2, head_ids=np.zeros((2, 3), np.int32), draw_ids=np.zeros((2, 5), np.int32)
    )
    assert (query.rows, query.k, query.tail_draws) == (2, 3, 5)


def test_a_cache_key_has_all_that_determines_the_rows() -> None:
    """Rows of another temperature, seed, vocabulary or teacher must never be served."""
    ids = np.arange(4, dtype=np.int32)
    head = np.zeros((3, 2), np.int32)
    draws = np.ones((3, 2), np.int32)
    queries = {
        "plain": ScoreQuery(ids, 1, top_k=2),
        "tokens": ScoreQuery(ids[::-1].copy(), 1, top_k=2),
        "length": ScoreQuery(ids[:3], 1, top_k=2),
        "start": ScoreQuery(ids, 2, top_k=2),
        "top_k": ScoreQuery(ids, 1, top_k=3),
        "head_ids": ScoreQuery(ids, 1, head_ids=head),
        "other head_ids": ScoreQuery(ids, 1, head_ids=head + 1),
        "temperature": ScoreQuery(ids, 1, top_k=2, temperature=0.7),
        "f32": ScoreQuery(ids, 1, top_k=2, f32=True),
        "samples": ScoreQuery(ids, 1, top_k=2, tail_samples=4),
        "number of samples": ScoreQuery(ids, 1, top_k=2, tail_samples=5),
        "seed": ScoreQuery(ids, 1, top_k=2, tail_samples=4, seed=1),
        "draw_ids": ScoreQuery(ids, 1, head_ids=head, draw_ids=draws),
        "other draw_ids": ScoreQuery(ids, 1, head_ids=head, draw_ids=draws + 1),
        "vocab_size": ScoreQuery(ids, 1, top_k=2, vocab_size=9),
        "images": ScoreQuery(ids, 1, top_k=2, images=(b"a",)),
        "other images": ScoreQuery(ids, 1, top_k=2, images=(b"b",)),
    }
    keys = {name: row_key("teacher", 0, query) for name, query in queries.items()}
    keys["version"] = row_key("teacher", 1, queries["plain"])
    keys["fingerprint"] = row_key("other", 0, queries["plain"])
    assert len(set(keys.values())) == len(keys)
    assert keys["plain"] == row_key("teacher", 0, ScoreQuery(ids.copy(), 1, top_k=2))
