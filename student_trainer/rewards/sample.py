"""The input and the output of a reward, and comparisons of texts. Does not import torch."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import InvalidInput
from protos.extras import install_command

MARK = "####"  # GSM8K's mark before the final answer

_PRICE = re.compile(r"\$?\s*(-?\d+(?:\.\d+)?)\.?")


@dataclass(frozen=True)
class RewardSample:
    """An answer to score.

    - prompt: the text of the prompt in the data.
    - text: the text of the answer.
    - reference: the reference answer, "" if there is none.
    - fields: the values of the prompt's record by column name.
    - tokens: the number of tokens of the answer.
    """

    prompt: str
    text: str
    reference: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, eq=False)
class Scores:
    """The rewards of n answers.

    values: [n] float64, NaN for an answer that could not be scored.
    """

    values: NDArray[np.float64]
    faults: tuple[str, ...] = ()
    """The reason for each answer without a reward."""

    @property
    def errors(self) -> int:
        """The number of answers without a reward."""
        return len(self.faults)


def conclusion(text: str) -> str:
    """Return the final answer of a text: the text after the last '####', up to the end of its line.

    '####' marks the final answer in GSM8K. If the text has no such mark, the whole text is
    returned. Commas are kept; `final_answer` removes them.
    """
    _, mark, after = text.rpartition(MARK)
    return after.strip().partition("\n")[0].rstrip() if mark else text.strip()


def missing_package(package: str, kind: str, extra: str = "rl") -> InvalidInput:
    """Return the error that a reward raises if its package is not installed.

    `kind`: the type of the reward. `extra`: the extra of distill-service that installs the package.
    """
    return InvalidInput(
        f"{kind} needs the package {package}, which is not installed",
        field="reward.type",
        hint=install_command(extra),
    )


def final_answer(text: str) -> str:
    """Return the `conclusion` of a text without commas.

    If the conclusion is a number, a dollar sign before it and a full stop after it are removed too.
    """
    bare = conclusion(text).replace(",", "")
    number = _PRICE.fullmatch(bare)
    return number[1] if number else bare


def exact_match(answer: str, reference: str) -> bool:
    """Return whether the final answers of both texts are equal; see `final_answer`."""
    return final_answer(answer) == final_answer(reference)


def normalized(text: str) -> str:
    """Return the words of a text in lower case, without punctuation and articles.

    SQuAD and Search-R1 normalize texts in the same way.
    """
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def same_words(answer: str, reference: str) -> bool:
    """Return whether both texts have the same normalized words.

    Search-R1 calls this comparison exact match.
    """
    return normalized(answer) == normalized(reference)


def f1(answer: str, reference: str) -> float:
    """Return the F1 score of the normalized words: the harmonic mean of precision and recall."""
    answer_words, reference_words = normalized(answer).split(), normalized(reference).split()
    common_words = (Counter(answer_words) & Counter(reference_words)).total()
    return (
        2 * common_words / (len(answer_words) + len(reference_words))
        if common_words
        else float(answer_words == reference_words)
    )
