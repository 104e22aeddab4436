"""Whether an answer is right."""

from __future__ import annotations


def final_answer(text: str) -> str:
    """What counts of an answer: what follows its last '####' (GSM8K's mark), or all of it."""
    return text.rsplit("####", 1)[-1].strip().replace(",", "")


def exact_match(answer: str, reference: str) -> bool:
    return final_answer(answer) == final_answer(reference)
