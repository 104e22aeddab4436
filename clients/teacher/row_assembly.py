"""Assembles the chunks of one sequence: every row once, and all rows from one scoring."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from clients.teacher.query import ScoreQuery
from protos import teacher_pb2
from protos.errors import Corrupt
from protos.rows.codec import RowBlock, decode_rows


class RowAssembly:
    """The rows of `query` received so far, possibly over several connections. Not thread-safe."""

    def __init__(self, query: ScoreQuery) -> None:
        self._query = query
        self.restart()

    @property
    def next_position(self) -> int:
        """Position of the first missing row."""
        return self._query.start + self._filled

    @property
    def resume_position(self) -> int:
        """The `next_position` of a request for the missing rows; 0 if no row was received."""
        return self.next_position if self._filled else 0

    def restart(self) -> None:
        """Discard all rows."""
        self._filled = 0
        self._whole: RowBlock | None = None
        self._digest: int | None = None

    def continues(self, chunk: teacher_pb2.ScoreChunk) -> bool:
        """True if the chunk is from the same scoring as the rows received so far."""
        return self._digest in (None, chunk.scoring_digest)

    def add(self, chunk: teacher_pb2.ScoreChunk) -> RowBlock | None:
        """Append a chunk; return all rows, with head ids, once they are complete, else None.

        Raises Corrupt if rows are missing, duplicate, damaged or of an unexpected shape or dtype.
        """
        block = decode_rows(chunk.payload)
        query, expected = self._query, self.next_position
        left = len(query.token_ids) - expected
        if chunk.first_position != expected or not 0 < len(block) <= left:
            raise Corrupt(
                f"the teacher sent {len(block)} rows from position {chunk.first_position}, but 1 to"
                f" {left} rows from position {expected} were expected"
            )
        chosen_by_teacher = block.head_ids is not None
        if block.k != query.k or chosen_by_teacher != (query.head_ids is None):
            with_ids = "with" if chosen_by_teacher else "without"
            raise Corrupt(
                f"the teacher sent rows {with_ids} head ids and with k = {block.k}, but the query"
                f" has k = {query.k}"
            )
        if (block.tail_samples, block.tail_draws) != (query.tail_samples, query.tail_draws):
            raise Corrupt(
                f"the teacher sent {block.tail_samples} tail samples and {block.tail_draws} tail"
                f" draws per row, but {query.tail_samples} and {query.tail_draws} were requested"
            )
        if len(block) != chunk.count or chunk.last != (len(block) == left):
            raise Corrupt(
                f"the teacher sent {len(block)} rows, but announced {chunk.count} rows and last ="
                f" {chunk.last}"
            )
        if (block.head_logprobs.dtype == np.float32) != query.f32:
            raise Corrupt(
                f"the teacher sent {block.head_logprobs.dtype} log-probs, but"
                f" {'float32' if query.f32 else 'float16'} was requested"
            )
        self._digest = chunk.scoring_digest
        whole = self._copy(block)
        return whole if chunk.last else None

    def _copy(self, block: RowBlock) -> RowBlock:
        # Copy into one allocation: decoded rows are read-only views that keep the message alive,
        # and torch needs writable arrays.
        if self._whole is None:
            self._whole = _empty(self._query)
        whole = self._whole
        first, last = self._filled, self._filled + len(block)
        for column in fields(RowBlock):
            values = getattr(block, column.name)
            if values is not None:
                getattr(whole, column.name)[first:last] = values
        self._filled = last
        return whole


def _empty(query: ScoreQuery) -> RowBlock:
    shape = (query.rows, query.k)
    sampled, draws = query.tail_samples > 0, (query.rows, query.tail_draws)
    logprob = np.float32 if query.f32 else np.float16
    return RowBlock(
        head_ids=np.empty(shape, np.int32) if query.head_ids is None else query.head_ids,
        head_logprobs=np.empty(shape, logprob),
        tail_logmass=np.empty(query.rows, np.float32),
        token_logprobs=np.empty(query.rows, np.float32),
        tail_sample_ids=np.empty((query.rows, query.tail_samples), np.int32) if sampled else None,
        tail_sample_logprob=np.empty(query.rows, np.float32) if sampled else None,
        draw_logprobs=np.empty(draws, logprob) if query.tail_draws else None,
    )
