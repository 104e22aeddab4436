"""Reads the tokens and the chat template of a tokenizer, and compares two vocabularies.

The tokenizer is loaded by transformers, or is in a Hugging Face directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.data.outside import open_regular, read_document


def tokens_of(tokenizer: Any) -> list[str]:
    """Return the token of each id of a tokenizer, for `tokenizer_fingerprint`; "" for an unused id.

    The last entry is that of the highest id. If there are unused ids, the list is longer than the
    number of tokens.
    """
    count = max(tokenizer.get_vocab().values(), default=-1) + 1
    return [tokenizer.convert_ids_to_tokens(token_id) or "" for token_id in range(count)]


def answer_text(tokenizer: Any, ids: Sequence[int], *, has_end: bool) -> str:
    """Return the text of an answer, unchanged, for rewards, metrics and samples.

    `has_end`: the last id is an end token, which is removed. Tags that are special tokens, such as
    <think>, are kept, and spaces are not cleaned up.
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


LEGACY_TEMPLATE = "chat_template.json"
# The folder of a model directory with the chat templates other than the default template.
TEMPLATES = "additional_chat_templates"
_MAX_TEMPLATE_BYTES = 1 << 20


def tokens_in(model: Path) -> list[str] | None:
    """Return the token of each id from the tokenizer.json of a directory; "" for an unused id.

    Returns None if the file cannot be interpreted. transformers may append tokens from other files,
    but does not change the tokens of this file.
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


def chat_templates_in(model: Path) -> dict[str, str]:
    """Return the chat templates of a Hugging Face directory by name; {} if there are none.

    The template for ordinary prompts is named "default". Files are read in this order:
    chat_template.jinja and the files beside it, tokenizer_config.json, chat_template.json (older
    models). Raises OSError or ValueError if a file cannot be interpreted.
    """
    files = {file.stem: file for file in (model / TEMPLATES).glob("*.jinja")}
    files["default"] = model / "chat_template.jinja"
    texts = {name: read_template(file) for name, file in files.items() if file.exists()}
    for file in (model / "tokenizer_config.json", model / LEGACY_TEMPLATE):
        if not texts and file.exists():
            document = read_document(file)
            texts = _templates_of(document.get("chat_template")) if document else {}
    return texts


def default_template_in(model: Path) -> str | None:
    """Return the default chat template of a directory.

    Returns "" if the directory has none, and None if the files cannot be interpreted.
    """
    try:
        return chat_templates_in(model).get("default", "")
    except (OSError, ValueError):
        return None


def _templates_of(entry: Any) -> dict[str, str]:
    """Return the templates in the value of `chat_template`: text, or a list of names and texts."""
    named_templates = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    return {
        str(named.get("name")): str(named["template"])
        for named in named_templates
        if isinstance(named, dict) and named.get("template")
    }


def read_template(file: Path) -> str:
    """Return the text of a chat template. Raises OSError, or ValueError if it is too long."""
    with open_regular(file) as stream:
        content = stream.read(_MAX_TEMPLATE_BYTES + 1)
    if len(content) > _MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file} is longer than {_MAX_TEMPLATE_BYTES >> 20} MiB")
    return content.decode()


def tokenizer_facts(tokenizer: Any) -> list[str]:
    """Return texts that change whenever the tokenizer would encode a record differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have no backend
    rules = [backend.to_str()] if backend is not None else tokens_of(tokenizer)
    return [repr(tokenizer), repr(tokenizer.chat_template), *rules]
