"""What is judged, and what comes of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RewardSample:
    """An answer: its text and number of tokens, what it answers, and what is known of that."""

    prompt: str
    text: str
    reference: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, eq=False)
class Scores:
    """values float64 [n]; NaN where judging raised, took too long, or gave no finite number."""

    values: NDArray[np.float64]
    faults: tuple[str, ...] = ()
    """Why, in one sentence each."""

    @property
    def errors(self) -> int:
        """How many answers have no reward."""
        return len(self.faults)


def conclusion(text: str) -> str:
    """What follows the last '####', or all of it; with its commas, unlike `final_answer`."""
    return text.rsplit("####", 1)[-1].strip()
