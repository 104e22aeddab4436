"""Values from outside: what is read, and what is refused, against rules written out here."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.data.outside import parse_ids, parse_json, parse_number, parse_text

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_valid_json_is_read_as_it_is(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text) == value
        assert parse_json(text.encode()) == value
        assert parse_json(b"\xef\xbb\xbf" + text.encode()) == value


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\ud800\udc00\udbff\udfff\\u")))
def test_every_text_of_json_can_be_encoded(text: str) -> None:
    """Lone surrogates come from escapes; pairs of them are one character."""
    value = parse_json(json.dumps({text: [text]}))
    [(key, [entry])] = value.items()
    paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert key == entry == paired.replace("\ufffd", "?") or "\ufffd" in text
    entry.encode()


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"", "", "{", "[1,", "'a'", b'"\xed\xa0\x80"', "[" * 100_000, "1" * 10_000],
    ids=lambda data: repr(data)[:12],
)
def test_what_is_no_json_is_refused(data: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(("", ""), (" a\n", " a\n"), (72, "72"), (72.0, "72"), (-0.5, "-0.5"), (0.1, "0.1")),
        *((1e16, "10000000000000000"), (1e-5, "0.00001"), (10**400, "1" + "0" * 400)),
    ],
)
def test_texts_and_numbers_are_text(value: object, text: str) -> None:
    assert parse_text(value) == text


@pytest.mark.parametrize("value", [None, True, math.nan, -math.inf, b"a", [], {}, ["a"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not text"):
        parse_text(value)


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1], b"1"])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_number(value)


@given(st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_numbers(value: float) -> None:
    assert parse_number(value) == float(value)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_integers_are_ids(ids: list[int]) -> None:
    result = parse_ids(ids)
    assert result.dtype == np.int32
    assert result.tolist() == [min(max(number, -1), (1 << 31) - 1) for number in ids]


@pytest.mark.parametrize(
    "value", [None, 5, "12", [1.0], [True], [1, True], [1, None], ["1"], [[1]], [1, [2]], [1 << 64]]
)
def test_what_are_no_ids_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="list of integers"):
        parse_ids(value)
