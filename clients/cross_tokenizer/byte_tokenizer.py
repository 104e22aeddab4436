"""A tokenizer that encodes the text of an answer, and gives the bytes of each token.

The bytes of a token are read from tokenizer.json. `decode()` is not sufficient: a token may contain
only a part of a character, which `decode()` returns as U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clients.data.outside import read_document
from clients.data.tokens.continuation import without_first_space
from protos.errors import InvalidInput
from protos.extras import require_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVALID_BYTES = re.compile(
    "([\udc80-\udcff]+)"
)  # bytes of invalid UTF-8, as surrogateescape encodes them
_SPACE = "\u2581"  # SentencePiece writes a space as this character
# Decoder components with which a token has the same text at every position.
_CONTEXT_FREE_DECODERS = {
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Replace",
    "Metaspace",
    "Strip",
    "Sequence",
}


class ByteTokenizer:
    """Encodes the text of an answer, and returns the bytes of token ids.

    An answer follows a prompt. Therefore the tokenizer adds no special tokens and no leading space,
    and encodes the name of a special token as ordinary text.

    - lengths [V] int64: number of bytes of each token; 0 for special tokens and unused ids.
    """

    def __init__(self, document: Mapping[str, Any], label: str, field: str) -> None:
        """Load the tokenizer from `document`, the content of a tokenizer.json.

        `label` and `field`, such as "teacher" and "teacher.tokenizer", are used in the error.
        Raises InvalidInput if the document does not define the bytes of the tokens.
        """
        self._tokenizer = _load_backend(document)
        try:
            tokens = _bytes_of_tokens(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(
                f"tokenizer.json of the {label} does not define the bytes of its tokens: {error}",
                field=field,
                hint="use a model with a byte-level or SentencePiece tokenizer",
            ) from error
        self.lengths = np.array([len(token) for token in tokens], np.int64)
        self._offsets = np.cumsum(self.lengths) - self.lengths
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        single = np.flatnonzero(self.lengths == 1)
        self._token_of_byte = np.full(256, -1, np.int32)  # the token of each byte; -1: none
        self._token_of_byte[self._bytes[self._offsets[single]]] = single

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the token ids [T] of a text.

        Invalid UTF-8 bytes, encoded in `text` by Python's "surrogateescape", become byte tokens.
        They are removed if the vocabulary has no byte tokens.
        """
        if not _INVALID_BYTES.search(text):
            return self._encode_valid(text)
        parts = []
        for number, part in enumerate(_INVALID_BYTES.split(text)):
            broken = np.frombuffer(part.encode("utf-8", "surrogateescape"), np.uint8)
            parts.append(self._token_of_byte[broken] if number % 2 else self._encode_valid(part))
        ids = np.concatenate(parts)
        return ids[ids >= 0]

    def _encode_valid(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def ends(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the byte position [T] at which each token ends."""
        return np.cumsum(self.lengths[ids])

    def data(self, ids: NDArray[np.int32]) -> bytes:
        """Return the concatenated bytes of the tokens."""
        lengths, ends = self.lengths[ids], self.ends(ids)
        shift = np.repeat(self._offsets[ids] - (ends - lengths), lengths)
        return self._bytes[shift + np.arange(len(shift))].tobytes()


def tokenizer_in(directory: Path, label: str, field: str) -> ByteTokenizer:
    """Return the tokenizer of a Hugging Face directory.

    Raises InvalidInput, naming `field`, if the tokenizer.json of the directory cannot be used.
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


def _load_backend(document: Mapping[str, Any]) -> Tokenizer:
    require_extra("train", "aligning tokenizers", only={"transformers"})
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(without_first_space(document)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _bytes_of_tokens(document: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each token by id. Raises ValueError if the tokenizer is not supported."""
    model, decoder_types = document["model"], set(_decoder_types(document.get("decoder")))
    if not decoder_types or not decoder_types <= _CONTEXT_FREE_DECODERS:
        unsupported = ", ".join(sorted(decoder_types - _CONTEXT_FREE_DECODERS))
        raise ValueError(f"its decoder is {unsupported or 'missing'}")
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, in order
        ids = {number: token for number, (token, _) in enumerate(vocabulary)}
    else:
        ids = {number: token for token, number in vocabulary.items()}
    table = {ord(character): byte for byte, character in _byte_level().items()}
    marked = bool(decoder_types & {"Replace", "Metaspace"})

    def bytes_of(token: str) -> bytes:
        if "ByteLevel" in decoder_types:
            return _from_characters(token, table)
        return _from_text(token, marked)

    bytes_by_id = {number: bytes_of(token) for number, token in ids.items()}
    for added_token in document.get("added_tokens", []):
        bytes_by_id[added_token["id"]] = (
            b"" if added_token["special"] else bytes_of(added_token["content"])
        )
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and not isinstance(vocabulary, list):
        bytes_by_id[vocabulary.get(unknown, -1)] = b""
    bytes_by_id.pop(-1, None)
    count = max(bytes_by_id) + 1
    if count > 2 * len(bytes_by_id) + 1024:
        raise ValueError("its ids have large gaps")
    return [bytes_by_id.get(number, b"") for number in range(count)]


def _decoder_types(decoder: Any) -> Iterator[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", []):
        yield from _decoder_types(part)


def _from_characters(token: str, table: Mapping[int, int]) -> bytes:
    """Return the bytes of a byte-level token, or of an added token that is stored as text."""
    try:
        return bytes([table[ord(character)] for character in token])
    except KeyError:
        return token.encode()


def _from_text(token: str, marked: bool) -> bytes:
    match = _BYTE.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return (token.replace(_SPACE, " ") if marked else token).encode()


def _byte_level() -> dict[int, str]:
    """Return the character for each byte in byte-level BPE (GPT-2). Printable bytes are kept."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    nonprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(nonprintable)
    }
