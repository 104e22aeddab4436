"""Aligns the tokens of an answer with those of the teacher's tokenizer for the same text.

A chunk is a shortest run of student tokens that has the same bytes as a run of teacher tokens: it
ends where both have a boundary. With equal tokenizers each token is a chunk.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.alignment.byte_tokenizer import ByteTokenizer

# The last tokens of a text's encoding can change when the text goes on.
UNSETTLED = 2
# Teacher tokens that are encoded again to find where the encoding of a prefix differs.
_WINDOW = 4


@dataclass(frozen=True)
class Alignment:
    """An answer of n student tokens and the teacher's T tokens of its text.

    teacher_ids [T] int32: the teacher's encoding, with its end token if the student ended. chunk
    [n], teacher_chunk [T] int64: the chunk of each token, ascending; student tokens after the last
    common boundary have the next number, which no teacher token has. canonical [n] bool: tokens
    that the student's tokenizer has at the same place for the whole text. read [n] bool: tokens of
    the text that the teacher reads, and the end. settled [n] bool: tokens of chunks that stay the
    same if a text without an end goes on. one_to_one [n] bool: tokens that are one teacher token.
    text: without the end. complete: it is the whole answer, apart from a character that is cut
    where the answer was truncated.
    """

    teacher_ids: NDArray[np.int32]
    chunk: NDArray[np.int64]
    teacher_chunk: NDArray[np.int64]
    canonical: NDArray[np.bool_]
    read: NDArray[np.bool_]
    settled: NDArray[np.bool_]
    one_to_one: NDArray[np.bool_]
    text: str
    complete: bool


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
        before a special token and before bytes that are no UTF-8. None: nothing is left then, or
        the teacher's normalization changes the text (NFC).
        """
        written = len(ids) - ended
        special = np.flatnonzero(self.student.lengths[ids[:written]] == 0)
        last = int(special[0]) if len(special) else written
        data = self.student.data(ids[:last])
        text, cut = _decoded(data)
        whole = last == written and cut == b""
        teacher_ids = self.teacher.encode(text)
        if self.teacher.data(teacher_ids) != text.encode():
            return None
        ends, theirs = self.student.ends(ids[:last]), self.teacher.ends(teacher_ids)
        common = np.intersect1d(ends, theirs, assume_unique=True)
        chunk = np.full(len(ids), len(common))
        chunk[:last] = np.searchsorted(common, ends)
        teacher_chunk = np.searchsorted(common, theirs)
        canonical, read = np.zeros((2, len(ids)), np.bool_)
        canonical[:last] = self._canonical(ids[:last], ends, text)
        read[:last] = ends <= len(text.encode())
        if ended and whole:
            canonical[-1] = read[-1] = True
            teacher_ids = np.append(teacher_ids, np.int32(self._end))
            teacher_chunk = np.append(teacher_chunk, len(common))
            settled = len(common) + 1
        else:
            settled = int(teacher_chunk[-UNSETTLED:].min(initial=len(common)))
        if not len(teacher_ids):
            return None
        counts = (np.bincount(of, minlength=len(common) + 1) for of in (chunk, teacher_chunk))
        single = np.logical_and(*(count == 1 for count in counts))
        return Alignment(
            teacher_ids,
            chunk,
            teacher_chunk,
            canonical,
            read,
            chunk < settled,
            single[chunk],
            text,
            complete=whole or (last == written and cut is not None and not ended),
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

    def fixed(self, ids: NDArray[np.int32], found: Alignment) -> NDArray[np.int64]:
        """Return sigma [n]: how many teacher tokens the text before each student token fixes.

        The common prefix of the encodings of that text and of the whole, minus UNSETTLED tokens.
        Fewer tokens would be as right, with more variance. The encoding of a prefix is compared in
        a window of a few tokens, because it does not differ earlier.
        """
        data, teacher = found.text.encode(), self.teacher
        count = len(found.teacher_ids)
        theirs = teacher.ends(found.teacher_ids)
        starts = np.minimum(self.student.ends(ids) - self.student.lengths[ids], len(data))
        inside = np.searchsorted(theirs, starts, side="right")
        first = np.maximum(inside - _WINDOW, 0)
        begins = np.concatenate([[0], theirs])[first]
        windows = [
            data[a:b].decode(errors="ignore")
            for a, b in zip(begins.tolist(), starts.tolist(), strict=True)
        ]
        encoded = teacher.encode_each(windows)
        same = np.zeros((len(ids), _WINDOW), np.bool_)
        for row, (window, at) in enumerate(zip(encoded, first.tolist(), strict=True)):
            both = min(len(window), _WINDOW, count - at)
            same[row, :both] = window[:both] == found.teacher_ids[at : at + both]
        common = first + same.cumprod(1).sum(1)
        fixed = np.maximum(np.minimum(common, inside) - UNSETTLED, 0)
        return np.minimum.accumulate(fixed[::-1])[::-1]


def _decoded(data: bytes) -> tuple[str, bytes | None]:
    """Return the text, and the bytes of a character that is cut at its end.

    None in place of these bytes: the text ends before bytes that are no UTF-8.
    """
    decoder = getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), None
    return text, decoder.getstate()[0]
