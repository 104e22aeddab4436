"""A tokenizer as bytes: from the text of an answer to token ids, and from these to their bytes.

The bytes of a token are read from tokenizer.json. `decode()` strings would not do: a token may hold
a part of a character only, which they show as U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clients.data.regular_file import read_document
from protos.errors import InvalidInput
from protos.extras import require_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as surrogateescape has them
_SPACE = "\u2581"  # SentencePiece writes a space as this character
# Parts of decoders under which a token stands for the same text wherever it is.
_PLAIN = {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Metaspace", "Strip", "Sequence"}


class ByteTokenizer:
    """Encodes the text of an answer, and returns the bytes of token ids.

    An answer follows a prompt: the tokenizer adds no special tokens and no space at its start, and
    reads the name of a special token as ordinary text. `lengths` [V] int64: bytes of each token, 0
    for special tokens and unused ids, which stand for no text.
    """

    def __init__(self, document: Mapping[str, Any], label: str, field: str) -> None:
        """`document`: the content of a tokenizer.json.

        `label` and `field`, such as "teacher" and "teacher.tokenizer", are for the error: raises
        InvalidInput if the tokens of this kind of tokenizer have no bytes of their own.
        """
        self._tokenizer = _backend(document)
        try:
            tokens = _bytes_of_tokens(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(
                f"tokenizer.json of the {label} does not tell the bytes of its tokens: {error}",
                field=field,
                hint="use a model with a byte-level or SentencePiece tokenizer",
            ) from error
        self.lengths = np.array([len(token) for token in tokens], np.int64)
        self._first = np.cumsum(self.lengths) - self.lengths
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        single = np.flatnonzero(self.lengths == 1)
        self._of_byte = np.full(256, -1, np.int32)  # the token of each byte; -1: none
        self._of_byte[self._bytes[self._first[single]]] = single

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids [T] of a text.

        Bytes that are no UTF-8, which `text` has as Python's "surrogateescape" does, become the
        tokens of these bytes. Without such tokens they are left out.
        """
        if not _BROKEN.search(text):
            return self._encode(text)
        parts = []
        for number, part in enumerate(_BROKEN.split(text)):
            broken = np.frombuffer(part.encode("utf-8", "surrogateescape"), np.uint8)
            parts.append(self._of_byte[broken] if number % 2 else self._encode(part))
        ids = np.concatenate(parts)
        return ids[ids >= 0]

    def _encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def ends(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the byte position [T] at which each token ends."""
        return np.cumsum(self.lengths[ids])

    def data(self, ids: NDArray[np.int32]) -> bytes:
        """Return the bytes that the tokens stand for, joined."""
        lengths, ends = self.lengths[ids], self.ends(ids)
        shift = np.repeat(self._first[ids] - (ends - lengths), lengths)
        return self._bytes[shift + np.arange(len(shift))].tobytes()


def tokenizer_in(directory: Path, label: str, field: str) -> ByteTokenizer:
    """Return the tokenizer of a Hugging Face directory.

    Raises InvalidInput, naming `field`, if its tokenizer.json cannot be used.
    """
    try:
        document = read_document(directory / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"the tokenizer of the {label} cannot be read: {error}",
            field=field,
            hint="name a directory with a tokenizer.json",
        ) from error
    return ByteTokenizer(document, label, field)


def _backend(document: Mapping[str, Any]) -> Tokenizer:
    require_extra("train", "aligning tokenizers", only={"transformers"})
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(_without_first_space(document)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_first_space(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer that puts no space before a text."""

    def changed(part: Any) -> Any:
        match part:
            case {"type": "Sequence"}:
                parts = {key: value for key, value in part.items() if isinstance(value, list)}
                return part | {key: _kept(value) for key, value in parts.items()}
            case {"type": "Metaspace"}:
                return part | {"prepend_scheme": "never"}
            case {"type": "ByteLevel"}:
                return part | {"add_prefix_space": False}
            case {"type": "Prepend"}:
                return None
        return part

    def _kept(parts: list[Any]) -> list[Any]:
        return [one for one in map(changed, parts) if one is not None]

    both = ("normalizer", "pre_tokenizer")
    return dict(document) | {key: changed(document.get(key)) for key in both}


def _bytes_of_tokens(document: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each token by id. Raises ValueError if the kind is unknown."""
    model, kinds = document["model"], set(_kinds(document.get("decoder")))
    if not kinds or not kinds <= _PLAIN:
        raise ValueError(f"its decoder is {', '.join(sorted(kinds - _PLAIN)) or 'missing'}")
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, in order
        ids = {number: token for number, (token, _) in enumerate(vocabulary)}
    else:
        ids = {number: token for token, number in vocabulary.items()}
    table = {ord(character): byte for byte, character in _byte_level().items()}
    marked = bool(kinds & {"Replace", "Metaspace"})

    def bytes_of(token: str) -> bytes:
        if "ByteLevel" in kinds:
            return _from_characters(token, table)
        return _from_text(token, marked)

    found = {number: bytes_of(token) for number, token in ids.items()}
    for added in document.get("added_tokens", []):
        found[added["id"]] = b"" if added["special"] else bytes_of(added["content"])
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and not isinstance(vocabulary, list):
        found[vocabulary.get(unknown, -1)] = b""
    found.pop(-1, None)
    longest = max(found) + 1
    if longest > 2 * len(found) + 1024:
        raise ValueError("its ids have large gaps")
    return [found.get(number, b"") for number in range(longest)]


def _kinds(decoder: Any) -> Iterator[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", []):
        yield from _kinds(part)


def _from_characters(token: str, table: Mapping[int, int]) -> bytes:
    """Return the bytes of a byte-level token, or of a text that is stored beside such tokens."""
    try:
        return bytes([table[ord(character)] for character in token])
    except KeyError:
        return token.encode()


def _from_text(token: str, marked: bool) -> bytes:
    byte = _BYTE.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return (token.replace(_SPACE, " ") if marked else token).encode()


def _byte_level() -> dict[int, str]:
    """Return the character of each byte in byte-level BPE (GPT-2); printable ones keep theirs."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
