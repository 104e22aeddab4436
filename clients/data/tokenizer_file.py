"""The tokens of a Hugging Face directory, read from its tokenizer.json without any library."""

from __future__ import annotations

from pathlib import Path

from clients.data.regular_file import read_document


def tokens_in(model: Path) -> list[str] | None:
    """The token of each id, "" for one that the file does not name; None where it cannot be told.

    A library may add tokens behind them that other files name; it changes none.
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
            return None  # not a list that anybody should make
        tokens = [ids.get(number, "") for number in range(longest)]
        return tokens if all(isinstance(token, str) for token in tokens) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
