"""The head ids of a student as tokens of a teacher with another tokenizer, where words begin.

For the control variate of `cross_tokenizer/losses.py`: the teacher's log-probs of other tokens that
the student could have sampled as the first token of a word. At the start of a word, the encoding of
the preceding text does not depend on the next token, so one query covers all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.cross_tokenizer.alignment import Aligner, Alignment
from clients.cross_tokenizer.byte_tokenizer import ByteTokenizer


@dataclass(frozen=True)
class MatchedHeads:
    """The head ids of n tokens of an answer, as tokens of the teacher.

    teacher_rows [n] int64: the teacher's row, of its T tokens, for the same text. ids [n, K] int32:
    the teacher's tokens; 0 for a head id without one. matched [n, K] bool: the set S of each token;
    empty if S does not contain the token itself.
    """

    teacher_rows: NDArray[np.int64]
    ids: NDArray[np.int32]
    matched: NDArray[np.bool_]

    def teacher_ids(self, rows: int) -> NDArray[np.int32]:
        """Return the ids to ask for, [rows, K], one row for each token of the teacher."""
        ids = np.zeros((rows, self.ids.shape[1]), np.int32)
        has_match = self.matched.any(1)
        ids[self.teacher_rows[has_match]] = self.ids[has_match]
        return ids


@dataclass(frozen=True)
class HeadMap:
    """The student's ids as single tokens of the teacher.

    same [V] int32: the teacher's token with the same bytes; for the student's end token, the
    teacher's end token; -1: none. begins [V] bool: ids that begin a word after any finished word:
    those that start with a space, and the end token. A line break does not begin a word: many
    tokenizers merge it with the full stop before it. unended [256] bool: bytes that do not end a
    word, because they are white space, or because a token of either tokenizer has the byte followed
    by a space.
    """

    aligner: Aligner
    same_bytes: NDArray[np.int32]
    begins: NDArray[np.bool_]
    unended: NDArray[np.bool_]

    @classmethod
    def build(cls, aligner: Aligner, end: int | None) -> HeadMap:
        """Encode every token of the student with the teacher's tokenizer: 5 s for 100,000.

        `end`: the student's token that ends an answer, or None.
        """
        student = aligner.writer
        same_bytes = np.full(len(student.lengths), -1, np.int32)
        begins = np.zeros(len(same_bytes), np.bool_)
        for token_id in np.flatnonzero(student.lengths):
            token_bytes = student.data(np.array([token_id]))
            ids = aligner.reader.encode(token_bytes.decode("utf-8", "surrogateescape"))
            if len(ids) == 1 and aligner.reader.data(ids) == token_bytes:
                same_bytes[token_id] = ids[0]
                begins[token_id] = token_bytes[:1] == b" "
        if end is not None:
            same_bytes[end], begins[end] = aligner.reader_end, True
        unended = _before_spaces(student) | _before_spaces(aligner.reader)
        unended[list(b" \t\n\r")] = True
        return cls(aligner, same_bytes, begins, unended)

    def match(
        self, ids: NDArray[np.int32], heads: NDArray[np.int32], alignment: Alignment
    ) -> MatchedHeads:
        """Match the head ids of an answer.

        `ids` [n]: the tokens of the answer; `heads` [n, K]: their head ids; `alignment`: their
        alignment. S contains the head ids that begin a word and are one token of the teacher; for
        the first token, all head ids that are one token of the teacher. S depends on the preceding
        text only, except for the last tokens of a truncated answer: an end token is settled, and
        another token in its position is not.
        """
        lengths = self.aligner.writer.lengths[ids]
        starts = np.minimum(np.cumsum(lengths) - lengths, len(alignment.data))
        reader_lengths = self.aligner.reader.lengths[alignment.reader_ids]
        teacher_rows = np.searchsorted(np.cumsum(reader_lengths) - reader_lengths, starts)
        teacher_rows = np.minimum(teacher_rows, len(reader_lengths) - 1)
        preceding_bytes = np.append(np.frombuffer(alignment.data, np.uint8), np.uint8(0))[
            starts - 1
        ]
        is_first = np.arange(len(ids)) == 0
        is_word_start = (
            (is_first | ~self.unended[preceding_bytes]) & alignment.read & alignment.settled
        )
        matched = (self.same_bytes[heads] >= 0) & (is_first[:, None] | self.begins[heads])
        is_own_token = matched & (heads == ids[:, None])
        matched &= (is_own_token.any(1) & is_word_start)[:, None]
        return MatchedHeads(teacher_rows, np.where(matched, self.same_bytes[heads], 0), matched)


def _before_spaces(tokenizer: ByteTokenizer) -> NDArray[np.bool_]:
    """Return which bytes precede a space within a token, [256]."""
    text_ids = np.flatnonzero(tokenizer.lengths).astype(np.int32)
    data = np.frombuffer(tokenizer.data(text_ids), np.uint8)
    spaces = data == ord(" ")
    spaces[tokenizer.ends(text_ids) - tokenizer.lengths[text_ids]] = False
    return np.bincount(data[np.flatnonzero(spaces) - 1], minlength=256) > 0
