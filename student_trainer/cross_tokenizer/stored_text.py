"""Converts packed plain text of a teacher with another tokenizer to a line of the student.

A stored piece has several documents, each followed by an end token. It may begin and end inside a
document. The student's line has the student's encoding of the same documents in the same order. So
both models read the same text before a token. Each model has its own special tokens in front of a
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.cross_tokenizer.alignment import Aligner, Alignment
from protos.rows.codec import RowBlock, concatenate
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows

Ids = NDArray[np.int32]
# (alignment, ids of the writer's tokens, their rows) -> rows of the reader's tokens
MakeRows = Callable[[Alignment, Ids, RowBlock], AlignedRows]


@dataclass(frozen=True)
class StoredText:
    """Converts pieces of packed text to lines of the student.

    - aligner: aligns the teacher's tokens (the writer's) with the student's (the reader's).
    - ends: the teacher's ids that end a document.
    - begins, teacher_begins: the special tokens of student and teacher in front of a document.
    - rows: a function that computes the rows of the student's tokens from an alignment, the
      teacher's ids and the teacher's rows.
    - longest: maximum tokens of the student's line; a longer line is truncated. None: no limit.
    """

    aligner: Aligner
    ends: Ids
    begins: Ids
    teacher_begins: Ids
    rows: MakeRows
    longest: int | None

    def read(self, ids: Ids, block: RowBlock) -> tuple[Ids, AlignedRows] | None:
        """Return the student's tokens [n] of a piece, and the rows of all tokens except the first.

        - ids [T]: the teacher's tokens.
        - block: the T - 1 rows of all teacher tokens except the first.

        The teacher's first token has no row, so student tokens whose likelihood depends on it are
        not learned. Returns None if no part of the text can be aligned.
        """
        # The first token gets an unused row.
        all_rows = concatenate([block.slice(0, 1), block])
        parts: list[Ids] = []
        rows: list[AlignedRows] = []
        units = 0
        for first, end, ended in self._split_documents(ids):
            alignment = self.aligner.align(ids[first:end], has_end=ended)
            if alignment is None:
                continue
            part_rows = self.rows(alignment, ids[first:end], all_rows.slice(first, end))
            if first == 0:
                part_rows = _without_first(part_rows, alignment)
            elif self._begins_document(ids, first) and not _ends_with(parts, self.begins):
                parts.append(self.begins)
                rows.append(_placeholder_rows(part_rows, len(self.begins), units))
                units += 1
            parts.append(alignment.reader_ids)
            rows.append(replace(part_rows, word=part_rows.word + units))
            units += int(part_rows.word[-1]) + 1
        if not parts:
            return None
        line, line_rows = np.concatenate(parts), AlignedRows.joined(rows)
        if self.longest is not None and len(line) > self.longest:
            line, line_rows = line[: self.longest], _truncate_rows(line_rows, self.longest)
        if len(line) < 2:
            return None
        line_rows = line_rows.take(slice(1, None))
        return line, replace(line_rows, word=line_rows.word - line_rows.word[0])

    def _split_documents(self, ids: Ids) -> Iterator[tuple[int, int, bool]]:
        """Yield (first position, end position, True if it has an end token) of each document.

        The end position is the position after the last token. Special tokens separate documents. An
        end token belongs to the document that it ends.
        """
        first = 0
        for end in [*np.flatnonzero(self.aligner.writer.lengths[ids] == 0).tolist(), len(ids)]:
            ended = end < len(ids) and ids[end] in self.ends
            if end + ended > first:
                yield first, end + ended, bool(ended)
            first = end + 1

    def _begins_document(self, ids: Ids, first: int) -> bool:
        """Return True if a document begins at `first`: after an end token or a begin token."""
        return bool(np.isin(ids[first - 1], np.concatenate([self.ends, self.teacher_begins])))


def leading_special_tokens(tokenizer: Any, lengths: NDArray[np.int64]) -> Ids:
    """Return the special tokens [n] that a transformers tokenizer adds before a text.

    `lengths` [V]: the number of bytes of each token; 0 for special tokens.
    """
    ids = np.array(tokenizer("a")["input_ids"], np.int32)
    return ids[: int(np.argmax(lengths[ids] > 0))]


def _without_first(rows: AlignedRows, alignment: Alignment) -> AlignedRows:
    """Return the rows, with the unit of the teacher's first token marked as not learned.

    The first teacher token of a piece has no row.
    """
    in_first_chunk = alignment.reader_chunk == alignment.chunk[0]
    learned = rows.learned & ~np.isin(rows.word, rows.word[in_first_chunk])
    return replace(rows, learned=learned)


def _placeholder_rows(like: AlignedRows, count: int, unit: int) -> AlignedRows:
    """Return rows for `count` tokens that are not learned.

    - like: rows with the same columns.
    - unit: the unit number of the tokens.
    """
    placeholders = like.take(np.zeros(count, np.int64))
    return replace(
        placeholders,
        token_logprobs=np.zeros(count, np.float32),
        word=np.full(count, unit),
        learned=np.zeros(count, np.bool_),
        one_to_one=np.zeros(count, np.bool_),
    )


def _truncate_rows(rows: AlignedRows, count: int) -> AlignedRows:
    """Return the first `count` rows. A unit that is cut off is marked as not learned."""
    remaining_rows = rows.take(slice(0, count))
    return replace(
        remaining_rows, learned=remaining_rows.learned & (remaining_rows.word != rows.word[count])
    )


def _ends_with(parts: list[Ids], ids: Ids) -> bool:
    """Return True if the last part ends with `ids`, or if `ids` is empty."""
    return not len(ids) or (bool(parts) and np.array_equal(parts[-1][-len(ids) :], ids))
