"""Packed plain text of a teacher with another tokenizer, as a line of the student.

A stored piece has several documents with an end token after each; it may begin and end within one.
The line of the student has its own encoding of each of them, in the same order, so both have read
the same text before a token. Special tokens in front of a document are those of each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.alignment.alignment import Aligner, Alignment
from protos.rows.codec import RowBlock, concatenate
from student_trainer.data.aligned import AlignedRows

Ids = NDArray[np.int32]
# Makes the rows of the reader's tokens from an alignment and the ids and rows of the writer's.
MakeRows = Callable[[Alignment, Ids, RowBlock], AlignedRows]


@dataclass(frozen=True)
class StoredText:
    """Reads pieces of packed text.

    aligner: the teacher has written, the student reads. ends: the teacher's ids that end a
    document. begins, their_begins: the special tokens of student and teacher in front of one.
    longest: the most tokens of the student's line, which is cut there; None: no limit.
    """

    aligner: Aligner
    ends: Ids
    begins: Ids
    their_begins: Ids
    rows: MakeRows
    longest: int | None

    def read(self, ids: Ids, block: RowBlock) -> tuple[Ids, AlignedRows] | None:
        """Return the student's tokens [n] of a piece, and rows of all but the first.

        `ids` [T]: of the teacher; `block`: T - 1 rows, of all but the first token. The student
        learns no token whose likelihood depends on the first of the teacher's. None: nothing of the
        text can be aligned.
        """
        # A row for the first token, which is read nowhere.
        every = concatenate([block.slice(0, 1), block])
        parts: list[Ids] = []
        rows: list[AlignedRows] = []
        units = 0
        for first, last, ended in self._documents(ids):
            found = self.aligner.align(ids[first:last], ended=ended)
            if found is None:
                continue
            of_part = self.rows(found, ids[first:last], every.slice(first, last))
            if first == 0:
                of_part = _without_first(of_part, found)
            elif self._is_begun(ids, first) and not _ends_with(parts, self.begins):
                parts.append(self.begins)
                rows.append(_unread(of_part, len(self.begins), units))
                units += 1
            parts.append(found.reader_ids)
            rows.append(replace(of_part, word=of_part.word + units))
            units += int(of_part.word[-1]) + 1
        if not parts:
            return None
        line, of_line = np.concatenate(parts), AlignedRows.joined(rows)
        if self.longest is not None and len(line) > self.longest:
            line, of_line = line[: self.longest], _cut(of_line, self.longest)
        if len(line) < 2:
            return None
        of_line = of_line.taken(slice(1, None))
        return line, replace(of_line, word=of_line.word - of_line.word[0])

    def _documents(self, ids: Ids) -> Iterator[tuple[int, int, bool]]:
        """Yield the first and last position of each part between special tokens.

        Also whether an end token ends the part; it then belongs to it.
        """
        first = 0
        for last in [*np.flatnonzero(self.aligner.writer.lengths[ids] == 0).tolist(), len(ids)]:
            ended = last < len(ids) and ids[last] in self.ends
            if last + ended > first:
                yield first, last + ended, bool(ended)
            first = last + 1

    def _is_begun(self, ids: Ids, first: int) -> bool:
        """Return whether a document begins at `first`: after an end, or the teacher's begin."""
        return bool(np.isin(ids[first - 1], np.concatenate([self.ends, self.their_begins])))


def begins_of(tokenizer: Any, lengths: NDArray[np.int64]) -> Ids:
    """Return the special tokens [n] that a tokenizer of transformers puts in front of a text.

    `lengths` [V]: bytes of each token.
    """
    ids = np.array(tokenizer("a")["input_ids"], np.int32)
    return ids[: int(np.argmax(lengths[ids] > 0))]


def _without_first(rows: AlignedRows, found: Alignment) -> AlignedRows:
    """Return rows without the unit of the writer's first token, whose row is not stored."""
    unread = found.reader_chunk == found.chunk[0]
    learned = rows.learned & ~np.isin(rows.word, rows.word[unread])
    return replace(rows, learned=learned)


def _unread(like: AlignedRows, count: int, unit: int) -> AlignedRows:
    """Return rows of `count` tokens that are not learned, with the columns of another."""
    none = like.taken(np.zeros(count, np.int64))
    return replace(
        none,
        token_logprobs=np.zeros(count, np.float32),
        word=np.full(count, unit),
        learned=np.zeros(count, np.bool_),
        one_to_one=np.zeros(count, np.bool_),
    )


def _cut(rows: AlignedRows, count: int) -> AlignedRows:
    """Return the first `count` rows; what is left of a unit is not learned."""
    left = rows.taken(slice(0, count))
    return replace(left, learned=left.learned & (left.word != rows.word[count]))


def _ends_with(parts: list[Ids], ids: Ids) -> bool:
    """Return whether nothing is to be added: no ids, or they are there already."""
    return not len(ids) or (bool(parts) and np.array_equal(parts[-1][-len(ids) :], ids))
