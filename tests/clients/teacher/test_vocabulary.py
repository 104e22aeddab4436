"""Vocabularies are compared up to the highest id, even if some ids are unused."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from clients.data.tokens.tokenizer import first_difference, tokens_of
from clients.teacher.query import tokenizer_fingerprint


def tokens_with_holes(last_token: str) -> list[str]:
    """Return a vocabulary of 12 tokens, of which one has id 15."""
    words = {f"w{number}": number for number in range(11)} | {last_token: 15}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    return tokens_of(PreTrainedTokenizerFast(tokenizer_object=model))


def test_a_difference_behind_a_hole_is_found() -> None:
    student_tokens, teacher_tokens = tokens_with_holes("red"), tokens_with_holes("blue")
    assert student_tokens == [*(f"w{number}" for number in range(11)), *4 * [""], "red"]
    assert tokenizer_fingerprint(student_tokens) != tokenizer_fingerprint(teacher_tokens)
    assert "id 15 is 'red'" in first_difference(teacher_tokens, student_tokens)
