"""What is learned from, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """token_ids [T] int64 on the CPU, of which those from `start` on (at least 1) are learned."""

    token_ids: Tensor
    start: int

    @property
    def completion(self) -> Tensor:
        return self.token_ids[self.start :]

    @property
    def learned(self) -> int:
        """How many tokens are."""
        return len(self.completion)
