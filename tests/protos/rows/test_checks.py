"""Ids and log-probs of another program: every wrong number is seen, every right one accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protos.errors import Corrupt
from protos.rows.checks import ROUNDING, are_ids, are_logprobs, check_rows
from protos.rows.codec import RowBlock

BLOCK = RowBlock(
    head_ids=np.array([[0, 9], [3, 4]], np.int32),
    head_logprobs=np.array([[-0.5, -np.inf], [-2, 0]], np.float16),
    tail_logmass=np.array([-np.inf, -1], np.float32),
    token_logprobs=np.array([-7, 0], np.float32),
    tail_sample_ids=np.array([[5], [9]], np.int32),
    tail_sample_logprob=np.array([-3, -4], np.float32),
    draw_logprobs=np.array([[-1], [-2]], np.float32),
)


def are_at_most_zero(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare each number, NaN too, as float64."""
    limit = float(np.array(ROUNDING, values.dtype))
    return np.array([float(value) <= limit for value in values])


def test_every_float16() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    expected = are_at_most_zero(values)
    assert 0 < expected.sum() < len(values)
    actual = [are_logprobs(values[index : index + 1]) for index in range(len(values))]
    assert actual == expected.tolist()


def test_float32_at_random_and_at_the_limits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, ROUNDING, 2 * ROUNDING, 1e-45, -1e-45]
    values = np.concatenate([bits.view(np.float32), np.array(edges, np.float32)])
    expected = are_at_most_zero(values)
    actual = [are_logprobs(values[index : index + 1]) for index in range(len(values))]
    assert actual == expected.tolist()


def test_one_wrong_number_among_many() -> None:
    values = np.full((100, 64), -1.5, np.float16)
    assert are_logprobs(values)
    for wrong in (np.nan, -np.nan, 0.5, np.inf):
        changed = values.copy()
        changed[57, 3] = wrong
        assert not are_logprobs(changed)


@pytest.mark.parametrize("wrong", [-1, -(2**31), 10, 2**31 - 1])
def test_ids_outside_the_vocabulary(wrong: int) -> None:
    ids = np.arange(10, dtype=np.int32)
    assert are_ids(ids, 10)
    assert are_ids(ids[:0], 10)
    ids[4] = wrong
    assert not are_ids(ids, 10)


def test_rows_of_a_teacher_are_accepted() -> None:
    check_rows(BLOCK, 10)
    check_rows(replace(BLOCK, head_ids=None, draw_logprobs=None), 10)


@pytest.mark.parametrize("name", ["head_ids", "tail_sample_ids"])
def test_rows_with_other_ids_are_refused(name: str) -> None:
    with pytest.raises(Corrupt, match=f"{name} from .* to 9, but there are 9 ids"):
        check_rows(BLOCK if name == "head_ids" else replace(BLOCK, head_ids=None), 9)


@pytest.mark.parametrize(
    "name",
    ["head_logprobs", "tail_logmass", "token_logprobs", "tail_sample_logprob", "draw_logprobs"],
)
@pytest.mark.parametrize("wrong", [np.nan, 0.25, np.inf])
def test_rows_with_numbers_that_are_no_logprobs_are_refused(name: str, wrong: float) -> None:
    values = getattr(BLOCK, name).copy()
    values.flat[-1] = wrong
    with pytest.raises(Corrupt, match=name):
        check_rows(replace(BLOCK, **{name: values}), 10)
