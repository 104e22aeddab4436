"""Aligns the tokens of an answer with those of another tokenizer for the same text.

The writer is the tokenizer of the answer's tokens, the reader the other one. On-policy the student
is the writer and the teacher the reader; for a store it is the other way round.

A chunk is a shortest run of the writer's tokens that has the same bytes as a run of the reader's:
it ends where both have a boundary. With equal tokenizers each token is a chunk.

A word is a run of chunks from one beginning of white space to the next. Tokens of the usual
tokenizers do not cross words, so the text after a word does not change its tokens. Where a token
does cross, or where there is no white space, a word is longer.
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
    """An answer of n tokens of the writer, and the reader's T tokens of its text.

    reader_ids [T] int32: the reader's encoding, with its end token if the answer has ended. chunk,
    word [n], reader_chunk, reader_word [T] int64: the number of each token's chunk and word,
    ascending; an end is a chunk and a word of its own, and so are tokens that are not read.
    canonical [n] bool: tokens that the writer has at the same place for the whole text. read [n]
    bool: tokens of the text that the reader reads, and the end; the first tokens of the answer.
    settled [n], reader_settled [T] bool: tokens that stay the same if a text without an end goes
    on. one_to_one [n], reader_one_to_one [T] bool: tokens that are one token of the other. data:
    the bytes of the text. stopped: the next token after those that are read is a special token,
    which ends the text but not the answer.
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
    """Aligns the answers of one tokenizer with the tokens of another."""

    def __init__(self, writer: ByteTokenizer, reader: ByteTokenizer, reader_end: int) -> None:
        """`reader_end`: the id with which the reader ends an answer."""
        self.writer = writer
        self.reader = reader
        self.reader_end = reader_end

    def align(self, ids: NDArray[np.int32], *, has_end: bool) -> Alignment | None:
        """Return the alignment of an answer; None if no text of it can be aligned.

        `ids` [n]: its tokens; `has_end`: the last one is the writer's end token. The text stops
        before a special token, and before a character that is cut where an answer without an end
        stops. None: nothing is left then, or the reader's normalization changes the text (NFC).
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
        """Return which tokens are the same in the writer's encoding of the complete text."""
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
    """Figures of texts: tokens of the student, and shares of them or of the texts.

    one_to_one: of tokens that are one token of the teacher. left_out: of texts that cannot be
    aligned, because the teacher's normalization changes them.
    """

    texts: int
    tokens: int
    one_to_one: float
    left_out: float


def measure_shares(aligner: Aligner, texts: Iterable[str]) -> Shares:
    """Encode texts with the student's tokenizer and align them with the teacher's."""
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
    """Return the byte positions at which white space begins."""
    space = np.isin(np.frombuffer(data, np.uint8), _SPACES)
    return np.flatnonzero(space[1:] & ~space[:-1]) + 1


def _decode_answer(data: bytes, *, is_complete: bool) -> str:
    """Return the text, with invalid UTF-8 bytes encoded by "surrogateescape".

    `is_complete`: no bytes would follow; otherwise an incomplete character at the end is left out.
    """
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    return decoder.decode(data, final=is_complete)
