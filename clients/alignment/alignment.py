"""Aligns the tokens of an answer with those of the teacher's tokenizer for the same text.

A chunk is a shortest run of student tokens that has the same bytes as a run of teacher tokens: it
ends where both have a boundary. With equal tokenizers each token is a chunk.

A word is a run of chunks from one beginning of white space to the next. No usual tokenizer has a
token from one word into the next, so what follows a word does not change its tokens. Where one has,
or where there is no white space, a word is longer.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.alignment.byte_tokenizer import ByteTokenizer

# The last tokens of a text's encoding can change when the text goes on.
UNSETTLED = 2
_SPACES = np.frombuffer(b" \t\n\r", np.uint8)


@dataclass(frozen=True)
class Alignment:
    """An answer of n student tokens and the teacher's T tokens of its text.

    teacher_ids [T] int32: the teacher's encoding, with its end token if the student ended. word
    [n], teacher_word [T] int64: the number of each token's word, ascending; an end is a word of its
    own, and so are tokens that are not read. canonical [n] bool: tokens that the student's
    tokenizer has at the same place for the whole text. read [n] bool: tokens of the text that the
    teacher reads, and the end; the first tokens of the answer. settled [n], teacher_settled [T]
    bool: tokens that stay the same if a text without an end goes on. one_to_one [n] bool: tokens
    that are one teacher token. data: the bytes of the text. stopped: the next token after those
    that are read is a special token, which ends the text but not the answer.
    """

    teacher_ids: NDArray[np.int32]
    word: NDArray[np.int64]
    teacher_word: NDArray[np.int64]
    canonical: NDArray[np.bool_]
    read: NDArray[np.bool_]
    settled: NDArray[np.bool_]
    teacher_settled: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    data: bytes
    stopped: bool


class Aligner:
    """Aligns the answers of a student with the tokenizer of its teacher."""

    def __init__(self, student: ByteTokenizer, teacher: ByteTokenizer, teacher_end: int) -> None:
        """`teacher_end`: the id with which the teacher ends an answer."""
        self.student = student
        self.teacher = teacher
        self._end = teacher_end

    def align(self, ids: NDArray[np.int32], *, ended: bool) -> Alignment | None:
        """Return the alignment of an answer; None if no text of it can be aligned.

        `ids` [n]: its tokens; `ended`: the last one is the student's end token. The text stops
        before a special token, and before a character that is cut where an answer without an end
        stops. None: nothing is left then, or the teacher's normalization changes the text (NFC).
        """
        written = len(ids) - ended
        special = np.flatnonzero(self.student.lengths[ids[:written]] == 0)
        last = int(special[0]) if len(special) else written
        text = _decoded(self.student.data(ids[:last]), whole=ended or last < written)
        data = text.encode("utf-8", "surrogateescape")
        teacher_ids = self.teacher.encode(text)
        if self.teacher.data(teacher_ids) != data:
            return None
        ends, theirs = self.student.ends(ids[:last]), self.teacher.ends(teacher_ids)
        common = np.intersect1d(ends, theirs, assume_unique=True)
        words = np.intersect1d(common, _word_starts(data), assume_unique=True)
        chunk = np.full(len(ids), len(common))
        chunk[:last] = np.searchsorted(common, ends)
        word = np.full(len(ids), len(words) + 1)
        word[:last] = np.searchsorted(words, ends)
        teacher_chunk = np.searchsorted(common, theirs)
        teacher_word = np.searchsorted(words, theirs)
        canonical, read = np.zeros((2, len(ids)), np.bool_)
        canonical[:last] = self._canonical(ids[:last], ends, text)
        read[:last] = ends <= len(data)
        if ended and last == written:
            canonical[-1] = read[-1] = True
            teacher_ids = np.append(teacher_ids, np.int32(self._end))
            teacher_chunk = np.append(teacher_chunk, len(common))
            teacher_word = np.append(teacher_word, len(words) + 1)
            settled = len(common) + 1
        else:
            settled = int(teacher_chunk[-UNSETTLED:].min(initial=len(common)))
        if not len(teacher_ids):
            return None
        counts = (np.bincount(of, minlength=len(common) + 1) for of in (chunk, teacher_chunk))
        single = np.logical_and(*(count == 1 for count in counts))
        return Alignment(
            teacher_ids,
            word,
            teacher_word,
            canonical,
            read,
            chunk < settled,
            teacher_chunk < settled,
            single[chunk],
            data,
            stopped=last < written,
        )

    def _canonical(
        self, ids: NDArray[np.int32], ends: NDArray[np.int64], text: str
    ) -> NDArray[np.bool_]:
        """Return which tokens the student's tokenizer has at the same place for the whole text."""
        canonical = self.student.encode(text)
        if not len(canonical):
            return np.zeros(len(ids), np.bool_)
        theirs = self.student.ends(canonical)
        at = np.minimum(np.searchsorted(theirs, ends), len(canonical) - 1)
        found: NDArray[np.bool_] = (theirs[at] == ends) & (canonical[at] == ids)
        return found


def _word_starts(data: bytes) -> NDArray[np.int64]:
    """Return the byte positions at which white space begins."""
    space = np.isin(np.frombuffer(data, np.uint8), _SPACES)
    return np.flatnonzero(space[1:] & ~space[:-1]) + 1


def _decoded(data: bytes, *, whole: bool) -> str:
    """Return the text, with bytes that are no UTF-8 as "surrogateescape" has them.

    `whole`: nothing was to follow; otherwise a character that is cut at the end is left out.
    """
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    return decoder.decode(data, final=whole)
