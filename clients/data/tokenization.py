"""The tokens of a tokenizer by id, and the first difference between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tokens_of(tokenizer: Any) -> list[str]:
    """Return the token of each id, "" for an unused id; the input of `tokenizer_fingerprint`.

    The list ends at the highest id: with unused ids, that is beyond the number of tokens.
    """
    count = max(tokenizer.get_vocab().values(), default=-1) + 1
    return [tokenizer.convert_ids_to_tokens(i) or "" for i in range(count)]


def first_difference(
    teacher: Sequence[str], ours: Sequence[str], whose: str = "the student"
) -> str:
    """Return a message that names the first id with different tokens in two vocabularies."""
    for token_id, (mine, theirs) in enumerate(zip(ours, teacher, strict=False)):
        if mine != theirs:
            return (
                f"the tokenizers differ: id {token_id} is {mine!r} to {whose} and {theirs!r} to"
                " the teacher"
            )
    return f"the tokenizers differ: {whose} has {len(ours)} tokens, the teacher {len(teacher)}"
