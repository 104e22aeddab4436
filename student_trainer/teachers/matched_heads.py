"""The head ids of a student as tokens of a teacher with another tokenizer, where words begin.

For the control variate of `losses/cross_tokenizer.py`: the teacher's log-probs of other tokens that
the student could have written in place of the one that begins a word. There the text before is
encoded alike whichever of them comes, so one query has all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.alignment.alignment import Aligner, Alignment
from clients.alignment.byte_tokenizer import ByteTokenizer


@dataclass(frozen=True)
class MatchedHeads:
    """The head ids of n tokens of an answer, as tokens of the teacher.

    place [n] int64: the row of the teacher, of its T tokens, that is for the same text. ids [n, K]
    int32: the teacher's tokens; 0 where there is none. matched [n, K] bool: the set S of each
    token; none where the token is not in its own.
    """

    place: NDArray[np.int64]
    ids: NDArray[np.int32]
    matched: NDArray[np.bool_]

    def of_teacher(self, rows: int) -> NDArray[np.int32]:
        """Return the ids to ask for, [rows, K], one row for each token of the teacher."""
        asked = np.zeros((rows, self.ids.shape[1]), np.int32)
        used = self.matched.any(1)
        asked[self.place[used]] = self.ids[used]
        return asked


@dataclass(frozen=True)
class HeadMap:
    """The student's ids as single tokens of the teacher.

    same [V] int32: the teacher's token with the same bytes; of the student's end, its end; -1:
    none. begins [V] bool: ids that begin a word wherever one has ended: those with a space in
    front, and the end. A line break does not: many tokenizers have it in a token with the full
    stop before it. unended [256] bool: bytes that end no word, because they are white space, or
    because a token of either tokenizer has the byte and then a space.
    """

    aligner: Aligner
    same: NDArray[np.int32]
    begins: NDArray[np.bool_]
    unended: NDArray[np.bool_]

    @classmethod
    def of(cls, aligner: Aligner, end: int | None) -> HeadMap:
        """Encode every token of the student with the teacher's tokenizer: 5 s for 100,000.

        `end`: the student's token that ends an answer; None: it has none.
        """
        student = aligner.writer
        same = np.full(len(student.lengths), -1, np.int32)
        begins = np.zeros(len(same), np.bool_)
        for number in np.flatnonzero(student.lengths):
            data = student.data(np.array([number]))
            ids = aligner.reader.encode(data.decode("utf-8", "surrogateescape"))
            if len(ids) == 1 and aligner.reader.data(ids) == data:
                same[number] = ids[0]
                begins[number] = data[:1] == b" "
        if end is not None:
            same[end], begins[end] = aligner.reader_end, True
        unended = _before_spaces(student) | _before_spaces(aligner.reader)
        unended[list(b" \t\n\r")] = True
        return cls(aligner, same, begins, unended)

    def match(
        self, ids: NDArray[np.int32], heads: NDArray[np.int32], found: Alignment
    ) -> MatchedHeads:
        """Match the head ids of an answer.

        `ids` [n]: its tokens; `heads` [n, K]: their head ids; `found`: their alignment. S has the
        head ids that begin a word and are one token of the teacher; of the first token, all that
        are one token of it. It depends on what is before the token only, but for the last tokens
        of an answer that is cut: an end is settled, and another token at its place is not.
        """
        lengths = self.aligner.writer.lengths[ids]
        starts = np.minimum(np.cumsum(lengths) - lengths, len(found.data))
        theirs = self.aligner.reader.lengths[found.reader_ids]
        place = np.searchsorted(np.cumsum(theirs) - theirs, starts)
        place = np.minimum(place, len(theirs) - 1)
        before = np.append(np.frombuffer(found.data, np.uint8), np.uint8(0))[starts - 1]
        first = np.arange(len(ids)) == 0
        new = (first | ~self.unended[before]) & found.read & found.settled
        matched = (self.same[heads] >= 0) & (first[:, None] | self.begins[heads])
        written = matched & (heads == ids[:, None])
        matched &= (written.any(1) & new)[:, None]
        return MatchedHeads(place, np.where(matched, self.same[heads], 0), matched)


def _before_spaces(tokenizer: ByteTokenizer) -> NDArray[np.bool_]:
    """Return which bytes are in front of a space within a token, [256]."""
    every = np.flatnonzero(tokenizer.lengths).astype(np.int32)
    data = np.frombuffer(tokenizer.data(every), np.uint8)
    spaces = data == ord(" ")
    spaces[tokenizer.ends(every) - tokenizer.lengths[every]] = False
    return np.bincount(data[np.flatnonzero(spaces) - 1], minlength=256) > 0
