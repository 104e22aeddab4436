"""The tokens of a tokenizer by id, and the first difference between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tokens_of(tokenizer: Any) -> list[str]:
    """Return the token of each id, "" for an unused id; the input of `tokenizer_fingerprint`.

    The list ends at the highest id: with unused ids, that is beyond the number of tokens.
    """
    count = max(tokenizer.get_vocab().values(), default=-1) + 1
    return [tokenizer.convert_ids_to_tokens(token_id) or "" for token_id in range(count)]


def answer_text(tokenizer: Any, ids: Sequence[int], *, has_end: bool) -> str:
    """Return the text of an answer as the model wrote it; rewards, metrics and samples use it.

    Only its end token is left out: the last one, if `has_end`. Tags that are special tokens, such
    as <think>, stay, and no spaces are cleaned up.
    """
    ids = ids[:-1] if has_end else ids
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def first_difference(
    teacher_tokens: Sequence[str], tokens: Sequence[str], owner: str = "the student"
) -> str:
    """Return a message that names the first id with different tokens in two vocabularies."""
    for token_id, (token, teacher_token) in enumerate(zip(tokens, teacher_tokens, strict=False)):
        if token != teacher_token:
            return (
                f"the tokenizers differ: id {token_id} is {token!r} to {owner} and"
                f" {teacher_token!r} to the teacher"
            )
    count = len(teacher_tokens)
    return f"the tokenizers differ: {owner} has {len(tokens)} tokens, the teacher {count}"
