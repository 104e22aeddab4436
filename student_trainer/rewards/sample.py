"""The input and the output of a reward. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import InvalidInput
from protos.extras import install_command

MARK = "####"  # GSM8K's mark before the final answer


@dataclass(frozen=True)
class RewardSample:
    """An answer to score.

    prompt: the prompt as in the data. text: the answer. reference: the reference answer, "" if
    there is none. fields: the columns of the prompt's record. tokens: the answer's token count.
    """

    prompt: str
    text: str
    reference: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards of n answers. values: [n] float64, NaN for an answer that could not be scored."""

    values: NDArray[np.float64]
    faults: tuple[str, ...] = ()
    """The reason for each answer without a reward."""

    @property
    def errors(self) -> int:
        """Number of answers without a reward."""
        return len(self.faults)


def conclusion(text: str) -> str:
    """Return the text after the last '####' up to the end of its line.

    '####' is GSM8K's mark of the final answer; without it, returns the full text. Keeps commas,
    unlike `final_answer`.
    """
    _, mark, after = text.rpartition(MARK)
    return after.strip().partition("\n")[0].rstrip() if mark else text.strip()


def missing_package(package: str, kind: str, extra: str = "rl") -> InvalidInput:
    """Return the error for a reward of type `kind`; `extra` is the extra that has `package`."""
    return InvalidInput(
        f"{kind} needs the package {package}, which is not installed",
        field="reward.type",
        hint=install_command(extra),
    )
