"""Comparison of an answer's text with the reference: exact match, word match, F1."""

from __future__ import annotations

import re
import string
from collections import Counter


def final_answer(text: str) -> str:
    """Return the text after the last '####' (the mark of GSM8K), or all of it, without commas."""
    return text.rsplit("####", 1)[-1].strip().replace(",", "")


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
    said, wanted = normalized(answer).split(), normalized(reference).split()
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else float(said == wanted)
