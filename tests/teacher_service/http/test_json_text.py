"""The text of numbers, against what the standard library reads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from teacher_service.http.completions import (
    format_integers,
    format_literal,
    format_logprobs,
    join_parts,
)


def test_integers() -> None:
    values = np.array([[0, 7, 10, 99], [100, 12345, 262143, 1 << 30]])
    text = join_parts(values.shape, [format_integers(values), format_literal(b",")])
    assert text == b"0,7,10,99,100,12345,262143,1073741824,"


def test_literals_of_some_entries() -> None:
    values = np.arange(6).reshape(2, 3)
    odd = values % 2 == 1
    text = join_parts(
        values.shape, [format_literal(b"<<", odd), format_integers(values), format_literal(b";")]
    )
    assert text == b"0;<<1;2;<<3;4;<<5;"
    assert join_parts((0, 3), [format_literal(b"x"), format_integers(values[:0])]) == b""


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 30.0, 5000.0])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_logprobs_are_read_back(scale: float, dtype: type) -> None:
    values = -np.random.default_rng(0).exponential(scale, 5000).clip(max=9000).astype(dtype)
    text = join_parts(values.shape, [format_literal(b","), *format_logprobs(values)])
    read = np.array(json.loads(b"[" + text[1:] + b"]"))
    assert np.abs(read - values.astype(np.float64)).max() <= 5.1e-10
    large = np.abs(values) > 2**-6
    np.testing.assert_array_equal(read.astype(dtype)[large], values[large])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0.0),
        (1e-7, 0.0),
        (-math.inf, -9999.0),
        (-20000.0, -9999.0),
        (-9.9999999999, -10.0),
        (-0.9999999999, -1.0),
    ],
)
def test_logprobs_at_the_ends(value: float, expected: float) -> None:
    assert json.loads(join_parts((1,), [*format_logprobs(np.array([value]))])) == expected
