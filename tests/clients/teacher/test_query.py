"""A ScoreQuery refuses arrays of wrong shapes or types before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
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
