"""Reads the elements of a JSON array one by one. The memory does not grow with their number."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from clients.data.outside import MAX_BYTES, parse_json

_CHUNK_BYTES = 1 << 20
_SPACES = " \t\r\n"
# The longest literal or escape sequence. A value or an error this close to the end of the read text
# may come from the cut at that end.
_MAX_LITERAL = 16


def read_elements(stream: BinaryIO) -> Iterator[Any]:
    """Yield the elements of a JSON array in UTF-8, with or without a byte order mark.

    An element has at most MAX_BYTES. The memory is a small multiple of the longest element. Raises
    ValueError as `parse_json` does, with the position in the whole text. The elements before the
    error are yielded first.
    """
    window = _Window(stream)
    window.require("[", "Expecting value")
    is_first = True
    while True:
        mark = window.peek()
        if mark == "]":
            break
        if not is_first:
            window.require(",", "Expecting ',' delimiter")
        if window.peek() == "]" and not is_first:
            raise window.error("Expecting value", window.position)
        yield window.read_value()
        is_first = False
    window.require("]", "")
    if window.peek():
        raise window.error("Extra data", window.position)


class _Window:
    """The part of a text that is in memory. `position`: index of its next character."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self.position = 0
        self._is_complete = False
        self._bytes = 0  # number of decoded bytes
        # The size of the text before the window.
        self._chars = self._lines = self._column = 0
        self._decode_value = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is not white space, without reading it; "" at the end."""
        while True:
            text, length = self._text, len(self._text)
            while self.position < length and text[self.position] in _SPACES:
                self.position += 1
            if self.position < length:
                return text[self.position]
            if self._is_complete:
                return ""
            self._read(_CHUNK_BYTES)

    def require(self, mark: str, problem: str) -> None:
        """Read the next character. Raises ValueError with `problem` if it is not `mark`."""
        if self.peek() != mark:
            raise self.error(problem, self.position)
        self.position += 1

    def read_value(self) -> Any:
        """Read and return the next JSON value. Raises ValueError if it is invalid or too long."""
        self.peek()
        size = _CHUNK_BYTES
        while True:
            try:
                value, end = self._decode_value(self._text, self.position)
            except RecursionError as error:
                raise ValueError("the value is nested too deeply") from error
            except json.JSONDecodeError as error:
                is_near_end = error.pos >= len(self._text) - _MAX_LITERAL
                is_cut = is_near_end or error.msg.startswith("Unterminated string")
                if self._is_complete or not is_cut:
                    raise self.error(error.msg, error.pos) from error
                if len(self._text) - self.position > MAX_BYTES:
                    raise self.error(
                        f"element longer than {MAX_BYTES >> 20} MiB", self.position
                    ) from error
            else:
                # A number may be cut too, such as 1.5e-7 before its exponent.
                if end < len(self._text) - _MAX_LITERAL or self._is_complete:
                    break
            self._read(size)
            size *= 2
        if self._text.find("\\u", self.position, end) >= 0:  # perhaps half a surrogate pair
            value = parse_json(self._text[self.position : end])
        self.position = end
        return value

    def error(self, problem: str, position: int) -> ValueError:
        """Return an error as the module `json` raises it, with line and column in the whole text.

        `position`: index in the window.
        """
        line_start = self._text.rfind("\n", 0, position) + 1
        column = position - line_start + (0 if line_start else self._column)
        line = self._lines + self._text.count("\n", 0, position)
        place = f"line {line + 1} column {column + 1} (char {self._chars + position})"
        return ValueError(f"{problem}: {place}")

    def _read(self, size: int) -> None:
        """Remove the text before `position`, and append the next `size` bytes of the stream."""
        passed = self._text[: self.position]
        line_start = passed.rfind("\n") + 1
        self._column = len(passed) - line_start + (0 if line_start else self._column)
        self._lines += passed.count("\n")
        self._chars += len(passed)
        data = self._stream.read(size)
        self._is_complete = not data
        pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final=self._is_complete)
        except UnicodeDecodeError as error:
            first = self._bytes - pending + error.start
            length = error.end - error.start
            wrong = f"byte 0x{error.object[error.start]:02x} in position {first}"
            if length > 1:
                wrong = f"bytes in position {first}-{first + length - 1}"
            raise ValueError(f"'utf-8' codec can't decode {wrong}: {error.reason}") from error
        self._bytes += len(data)
        self._text = self._text[self.position :] + text
        self.position = 0
