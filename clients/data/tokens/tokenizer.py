"""Tokens and chat template of a tokenizer, loaded or in a directory; the difference of two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.data.models.files import TEMPLATES
from clients.data.regular_file import open_regular, read_document


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


_MAX_TEMPLATE_BYTES = 1 << 20


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


def chat_template_in(model: Path) -> str | None:
    """Return the text of the chat templates of a Hugging Face directory; None if it has none.

    transformers prefers chat_template.jinja, and reads tokenizer_config.json without it. Raises
    OSError or ValueError if a file cannot be interpreted.
    """
    files = [model / "chat_template.jinja", *(model / TEMPLATES).glob("*.jinja")]
    texts = [_read_template(file) for file in files if file.exists()]
    if not texts and (model / "tokenizer_config.json").exists():
        document = read_document(model / "tokenizer_config.json")
        template_entry = document.get("chat_template") if isinstance(document, dict) else None
        named_templates = (
            template_entry if isinstance(template_entry, list) else [{"template": template_entry}]
        )
        texts = [
            entry["template"]
            for entry in named_templates
            if isinstance(entry, dict) and entry.get("template")
        ]
    return "\n".join(map(str, texts)) or None


def _read_template(file: Path) -> str:
    with open_regular(file) as stream:
        content = stream.read(_MAX_TEMPLATE_BYTES + 1)
    if len(content) > _MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file} is longer than {_MAX_TEMPLATE_BYTES >> 20} MiB")
    return content.decode()
