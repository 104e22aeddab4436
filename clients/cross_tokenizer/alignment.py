"""Aligns the tokens of an answer with another tokenizer's tokens for the same text.

The writer is the tokenizer of the answer's tokens. The reader is the other tokenizer. In on-policy
distillation, the student is the writer and the teacher the reader. For a store, the teacher is the
writer and the student the reader.

A chunk is a shortest run of the writer's tokens that has the same bytes as a run of the reader's
tokens. A chunk therefore ends where both tokenizers have a token boundary. With equal tokenizers,
each token is a chunk.

A word is a run of chunks. A new word begins where white space begins. Tokens of common tokenizers
do not cross words, so the text after a word does not change the tokens of the word. If a token does
cross words, or if there is no white space, the word is longer.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer

# Number of last tokens of an encoding that can change when the text continues.
UNSETTLED = 2
_SPACES = np.frombuffer(b" \t\n\r", np.uint8)


@dataclass(frozen=True)
class Alignment:
    """The alignment of an answer of n writer tokens with the T reader tokens of its text.

    - reader_ids [T] int32: the reader's tokens of the text, with its end token if the answer has
      ended.
    - chunk [n], reader_chunk [T] int64: the index of each token's chunk, ascending.
    - word [n], reader_word [T] int64: the index of each token's word, ascending.
    - canonical [n] bool: whether the writer's encoding of the whole text has this token here.
    - read [n] bool: whether the token is in the text that the reader reads, or is the end token.
      These tokens are the first tokens of the answer.
    - settled [n], reader_settled [T] bool: whether the token stays the same if the text continues.
      True for all tokens if the text has ended.
    - one_to_one [n], reader_one_to_one [T] bool: whether one token of the other tokenizer has the
      same bytes.
    - data: the bytes of the text.
    - stopped: whether a special token follows the read tokens. It ends the text but not the answer.

    The module docstring defines chunks and words. An end token is a chunk and a word of its own.
    Tokens that are not read share the chunk index after the last chunk of the text.
    """

    reader_ids: NDArray[np.int32]
    chunk: NDArray[np.int64]
    reader_chunk: NDArray[np.int64]
    word: NDArray[np.int64]
    reader_word: NDArray[np.int64]
    canonical: NDArray[np.bool_]
    read: NDArray[np.bool_]
    settled: NDArray[np.bool_]
    reader_settled: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    reader_one_to_one: NDArray[np.bool_]
    data: bytes
    stopped: bool


class Aligner:
    """Aligns answers in tokens of one tokenizer (the writer) with tokens of another (reader)."""

    def __init__(self, writer: ByteTokenizer, reader: ByteTokenizer, reader_end: int) -> None:
        """Store the two tokenizers, and `reader_end`, the id of the reader's end token."""
        self.writer = writer
        self.reader = reader
        self.reader_end = reader_end

    def align(self, ids: NDArray[np.int32], *, has_end: bool) -> Alignment | None:
        """Return the alignment of an answer, or None if no text of the answer can be aligned.

        `ids` [n]: the tokens of the answer. `has_end`: whether the last token is the writer's end
        token.

        The text ends before the first special token. In an answer without an end token, the text
        also ends before an incomplete character. The result is None if the remaining text is empty,
        or if the reader's normalization (NFC) changes the text.
        """
        text_length = len(ids) - has_end
        special = np.flatnonzero(self.writer.lengths[ids[:text_length]] == 0)
        end = int(special[0]) if len(special) else text_length
        text = _decode_answer(self.writer.data(ids[:end]), is_complete=has_end or end < text_length)
        data = text.encode("utf-8", "surrogateescape")
        reader_ids = self.reader.encode(text)
        if self.reader.data(reader_ids) != data:
            return None
        writer_ends, reader_ends = self.writer.ends(ids[:end]), self.reader.ends(reader_ids)
        common = np.intersect1d(writer_ends, reader_ends, assume_unique=True)
        words = np.intersect1d(common, _word_starts(data), assume_unique=True)
        chunk = np.full(len(ids), len(common))
        chunk[:end] = np.searchsorted(common, writer_ends)
        word = np.full(len(ids), len(words) + 1)
        word[:end] = np.searchsorted(words, writer_ends)
        reader_chunk = np.searchsorted(common, reader_ends)
        reader_word = np.searchsorted(words, reader_ends)
        canonical, is_read = np.zeros((2, len(ids)), np.bool_)
        canonical[:end] = self._find_canonical(ids[:end], writer_ends, text)
        is_read[:end] = writer_ends <= len(data)
        if has_end and end == text_length:
            canonical[-1] = is_read[-1] = True
            reader_ids = np.append(reader_ids, np.int32(self.reader_end))
            reader_chunk = np.append(reader_chunk, len(common))
            reader_word = np.append(reader_word, len(words) + 1)
            settled = len(common) + 1
        else:
            settled = int(reader_chunk[-UNSETTLED:].min(initial=len(common)))
        if not len(reader_ids):
            return None
        counts = (np.bincount(of, minlength=len(common) + 1) for of in (chunk, reader_chunk))
        single = np.logical_and(*(count == 1 for count in counts))
        return Alignment(
            reader_ids,
            chunk,
            reader_chunk,
            word,
            reader_word,
            canonical,
            is_read,
            chunk < settled,
            reader_chunk < settled,
            single[chunk],
            single[reader_chunk],
            data,
            stopped=end < text_length,
        )

    def _find_canonical(
        self, ids: NDArray[np.int32], ends: NDArray[np.int64], text: str
    ) -> NDArray[np.bool_]:
        """Return for each token [n] whether the writer's encoding of the whole text has it there.

        `ends`: the byte position at which each token ends.
        """
        canonical = self.writer.encode(text)
        if not len(canonical):
            return np.zeros(len(ids), np.bool_)
        canonical_ends = self.writer.ends(canonical)
        positions = np.minimum(np.searchsorted(canonical_ends, ends), len(canonical) - 1)
        is_canonical: NDArray[np.bool_] = (canonical_ends[positions] == ends) & (
            canonical[positions] == ids
        )
        return is_canonical


@dataclass(frozen=True)
class Shares:
    """Statistics of the alignment of texts.

    - texts: number of texts.
    - tokens: number of the student's tokens.
    - one_to_one: share of these tokens that have the bytes of one token of the teacher.
    - left_out: share of texts that cannot be aligned, because the teacher's normalization changes
      them.
    """

    texts: int
    tokens: int
    one_to_one: float
    left_out: float


def measure_shares(aligner: Aligner, texts: Iterable[str]) -> Shares:
    """Return statistics of the alignment of texts. The aligner's writer is the student."""
    count = tokens = single = left_out = 0
    for text in texts:
        ids = aligner.writer.encode(text)
        if not len(ids):
            continue
        count += 1
        alignment = aligner.align(ids, has_end=False)
        left_out += alignment is None
        tokens += len(ids)
        single += 0 if alignment is None else int(alignment.one_to_one.sum())
    return Shares(count, tokens, single / max(tokens, 1), left_out / max(count, 1))


def _word_starts(data: bytes) -> NDArray[np.int64]:
    """Return the byte positions at which white space begins. A word begins there."""
    space = np.isin(np.frombuffer(data, np.uint8), _SPACES)
    return np.flatnonzero(space[1:] & ~space[:-1]) + 1


def _decode_answer(data: bytes, *, is_complete: bool) -> str:
    """Return the text of the bytes of an answer. Invalid UTF-8 bytes are kept as "surrogateescape".

    `is_complete`: no bytes follow. Otherwise an incomplete character at the end is removed.
    """
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    return decoder.decode(data, final=is_complete)
