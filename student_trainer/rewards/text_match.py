"""Whether an answer is right."""

from __future__ import annotations

import re
import string
from collections import Counter


def final_answer(text: str) -> str:
    """What counts of an answer: what follows its last '####' (GSM8K's mark), or all of it."""
    return text.rsplit("####", 1)[-1].strip().replace(",", "")


def exact_match(answer: str, reference: str) -> bool:
    return final_answer(answer) == final_answer(reference)


def normalized(text: str) -> str:
    """Words in lower case, without punctuation and articles: what questions are judged by since
    SQuAD, and in Search-R1.
    """
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def same_words(answer: str, reference: str) -> bool:
    """Search-R1's exact match."""
    return normalized(answer) == normalized(reference)


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of the shares of the answer's and of the reference's words in the other."""
    said, wanted = normalized(answer).split(), normalized(reference).split()
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else float(said == wanted)
