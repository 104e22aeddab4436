"""Reads the tokens of a Hugging Face directory from tokenizer.json, without transformers."""

from __future__ import annotations

from pathlib import Path

from clients.data.regular_file import read_document


def tokens_in(model: Path) -> list[str] | None:
    """Return the token of each id, "" for an unused id; None if the file cannot be interpreted.

    transformers may append tokens that other files name; it changes none of these.
    """
    try:
        document = read_document(model / "tokenizer.json")
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score, in order
            ids = {number: token for number, (token, _) in enumerate(vocabulary)}
        else:
            ids = {number: token for token, number in vocabulary.items()}
        ids |= {token["id"]: token["content"] for token in document.get("added_tokens", [])}
        longest = max(ids, default=-1) + 1
        if longest > 2 * len(ids) + 1024:
            return None  # a few huge ids would make a list that exceeds memory
        tokens = [ids.get(number, "") for number in range(longest)]
        return tokens if all(isinstance(token, str) for token in tokens) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
