"""Elements of JSON arrays: the values and errors of the module json, in bounded memory."""

from __future__ import annotations

import codecs
import io
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from clients.data.json_array import read_elements
from clients.data.outside import parse_json

TEXT = (
    ' [ {"a": "caf\u00e9 \U0001f600 \\u00e9\\ud83d\\ude00 \\ud83d ]", "b": [1, {"c": []}]},\n'
    ' -12.5e3,\ttrue, null, "\\"x\\\\", NaN , -Infinity,\r\n 7 , [[ ]], {} , "\\n" ]\n '
).encode()


class Slow(io.BytesIO):
    """A stream that returns at most `size` bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._size)


def result_of(parse: Callable[[bytes], Any], data: bytes) -> object:
    try:
        return repr(parse(data))  # NaN is not equal to itself
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_values_and_errors_are_those_of_json(size: int) -> None:
    """The whole text, each of its beginnings, and the text with each byte missing or replaced."""
    texts = [TEXT, b"[]", b" [ ] ", b"[1,]", b"[,]", b"[1 2]", b"[1] 2", b"[[1]", b"[{}}"]
    texts += [codecs.BOM_UTF8 + TEXT]
    texts += [TEXT[:end] for end in range(len(TEXT)) if b"[" in TEXT[:end]]
    for place in range(2, len(TEXT)):  # behind the first bracket
        texts += [TEXT[:place] + byte + TEXT[place + 1 :] for byte in (b"", b"x", b"\xff", b'"')]
    for text in texts:
        elements = result_of(lambda data: list(read_elements(Slow(data, size))), text)
        assert elements == result_of(parse_json, text), text


def test_the_memory_does_not_grow_with_the_elements() -> None:
    text = b"[" + b",\n".join([b'{"prompt": "%s"}' % (b"x" * 1000)] * 20_000) + b"]"
    stream = io.BytesIO(text)
    tracemalloc.start()
    try:
        assert sum(len(element["prompt"]) for element in read_elements(stream)) == 20_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20 < len(text)


def test_an_element_that_is_longer_than_a_read() -> None:
    text = b'[1, "' + b"x" * (5 << 20) + b'", 2]'
    assert [*map(str, read_elements(io.BytesIO(text)))] == ["1", "x" * (5 << 20), "2"]
