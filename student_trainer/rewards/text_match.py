"""Comparison of an answer's text with the reference: exact match, word match, F1."""

from __future__ import annotations

import re
import string
from collections import Counter

from student_trainer.rewards.sample import conclusion

_PRICE = re.compile(r"\$?\s*(-?\d+(?:\.\d+)?)\.?")


def final_answer(text: str) -> str:
    """Return the `conclusion` of a text without commas.

    A number loses a dollar sign before it and a full stop after it.
    """
    bare = conclusion(text).replace(",", "")
    number = _PRICE.fullmatch(bare)
    return number[1] if number else bare


def exact_match(answer: str, reference: str) -> bool:
    """Return whether the final answers of both texts are equal; see `final_answer`."""
    return final_answer(answer) == final_answer(reference)


def normalized(text: str) -> str:
    """Return the words in lower case, without punctuation and articles (as SQuAD, Search-R1)."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def same_words(answer: str, reference: str) -> bool:
    """Return whether both texts have the same normalized words: Search-R1's exact match."""
    return normalized(answer) == normalized(reference)


def f1(answer: str, reference: str) -> float:
    """Return the F1 of the normalized words, the harmonic mean of precision and recall."""
    answer_words, reference_words = normalized(answer).split(), normalized(reference).split()
    common_words = (Counter(answer_words) & Counter(reference_words)).total()
    return (
        2 * common_words / (len(answer_words) + len(reference_words))
        if common_words
        else float(answer_words == reference_words)
    )
