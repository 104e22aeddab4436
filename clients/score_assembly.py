"""Puts the chunks of one sequence together: every row once, and all rows of one scoring."""

from __future__ import annotations

from clients.score_query import ScoreQuery
from protos import teacher_pb2
from protos.errors import Corrupt
from protos.rows import RowBlock, concatenate, decode_rows


class ScoreAssembly:
    """The rows of `query` that came so far, also over several connections."""

    def __init__(self, query: ScoreQuery) -> None:
        self._query = query
        self.restart()

    @property
    def next_position(self) -> int:
        """The first row that is missing."""
        return self._query.start + sum(len(block) for block in self._blocks)

    @property
    def resume_position(self) -> int:
        """What a request for the rest says: 0 when nothing is there yet."""
        return self.next_position if self._blocks else 0

    def restart(self) -> None:
        """Forget every row."""
        self._blocks: list[RowBlock] = []
        self._digest: int | None = None

    def continues(self, chunk: teacher_pb2.ScoreChunk) -> bool:
        """Whether the chunk is of the scoring that the rows so far are of."""
        return self._digest in (None, chunk.scoring_digest)

    def add(self, chunk: teacher_pb2.ScoreChunk) -> RowBlock | None:
        """Append a chunk; the whole block, head ids filled in, once it is complete.

        Raises Corrupt for rows that are missing, sent twice, damaged or of another shape.
        """
        block = decode_rows(chunk.payload)
        query, expected = self._query, self.next_position
        left = len(query.token_ids) - expected
        if chunk.first_position != expected or not 0 < len(block) <= left:
            raise Corrupt(
                f"the teacher sent {len(block)} rows from position {chunk.first_position}, "
                f"expected up to {left} from {expected}"
            )
        chosen_by_teacher = block.head_ids is not None
        if block.k != query.k or chosen_by_teacher != (query.head_ids is None):
            raise Corrupt(f"the teacher sent rows with k = {block.k}, asked for {query.k}")
        if len(block) != chunk.count or chunk.last != (len(block) == left):
            raise Corrupt(f"the teacher sent {len(block)} rows and announced {chunk.count}")
        self._digest = chunk.scoring_digest
        self._blocks.append(block)
        return self._complete() if chunk.last else None

    def _complete(self) -> RowBlock:
        # A copy also for a single block: decoded arrays are read-only views, torch wants its own.
        block = concatenate(self._blocks)
        ids = block.head_ids if self._query.head_ids is None else self._query.head_ids
        return RowBlock(ids, block.head_logprobs, block.tail_logmass, block.token_logprobs)
