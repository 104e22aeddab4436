"""What is learned from, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protos.rows.codec import RowBlock


@dataclass(frozen=True)
class TokenSequence:
    """token_ids [T] int64 on the CPU, of which those from `start` on (at least 1) are learned."""

    token_ids: Tensor
    start: int

    @property
    def completion(self) -> Tensor:
        return self.token_ids[self.start :]

    @property
    def places(self) -> Tensor:
        """Where the tokens stand that are learned: [learned] int64, at least `start`."""
        return torch.arange(self.start, len(self.token_ids))

    @property
    def learned(self) -> int:
        """How many tokens are."""
        return len(self.places)

    def learned_rows(self, rows: RowBlock) -> RowBlock:
        """Those of the tokens that are learned, of the rows of the whole completion (or of just
        these tokens already).
        """
        if len(rows) == self.learned:
            return rows
        return rows.taken((self.places - self.start).numpy())
