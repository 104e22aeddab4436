"""Computes a lower bound of the number of tokens of texts that are too long to be tokenized."""

from __future__ import annotations

# Texts above both limits are left out without being tokenized. Longer tokens are of whitespace or
# of one repeated character.
_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN = 1 << 20, 64


def tokens_by_length(characters: int, max_tokens: int) -> int:
    """Return a lower bound of the number of tokens of a text if it exceeds `max_tokens`, else 0.

    The bound is computed from the number of characters. A text with a bound above `max_tokens` is
    skipped without tokenization, which would take about 400 bytes of memory per character.
    """
    is_too_long = characters > max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
    return characters // _CHARACTERS_PER_TOKEN if is_too_long else 0
