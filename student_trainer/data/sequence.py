"""The sequence of tokens that the student learns from, sampled or stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from protos.rows.codec import RowBlock
from student_trainer.data.images import SequenceImages


@dataclass(frozen=True)
class TokenSequence:
    """token_ids [T] int64 on the CPU; the tokens from index `start` (at least 1) on are learned.

    weight: multiplies the loss of the sequence. images: of the prompt; None if it has none.
    """

    token_ids: Tensor
    start: int
    weight: float = field(default=1.0, kw_only=True)
    images: SequenceImages | None = field(default=None, kw_only=True)

    @property
    def completion(self) -> Tensor:
        """The token ids from `start` on, [T - start] int64."""
        return self.token_ids[self.start :]

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the learned tokens, [learned] int64, at least `start`."""
        return torch.arange(self.start, len(self.token_ids))

    @property
    def learned(self) -> int:
        """Number of learned tokens."""
        return len(self.places)

    def learned_rows(self, rows: RowBlock) -> RowBlock:
        """Return the rows of the learned tokens.

        `rows`: of the whole completion, or of the learned tokens only; those are returned
        unchanged.
        """
        if len(rows) == self.learned:
            return rows
        return rows.taken((self.places - self.start).numpy())


@dataclass(frozen=True)
class MaskedSequence(TokenSequence):
    """A sequence of which only some tokens from `start` on are learned; mask [T - start] bool."""

    mask: Tensor

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the learned tokens, [learned] int64."""
        return super().places[self.mask]
