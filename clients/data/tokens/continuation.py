"""Computes the token ids of a text that follows other text, such as an answer after its prompt.

Tokenizers based on SentencePiece (Llama 2) add a space before every text. After a prompt this space
is wrong: "17+25=" and "42" must not become "17+25= 42".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from clients.data.control_tokens import marked_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The backend of each tokenizer; None for a tokenizer that puts no space before a text.
_BACKENDS: WeakKeyDictionary[Any, Tokenizer | None] = WeakKeyDictionary()


def continuation_ids(
    tokenizer: Any, text: str, *, has_placeholders: bool = False, split_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of `text` without a leading space or special tokens.

    The concatenation of a prompt's ids and these ids decodes to the prompt and `text`.
    `has_placeholders`: `text` is a result of `mark_names`. `split_special_tokens`: encode the names
    of special tokens as plain text.
    """
    if has_placeholders:
        return marked_ids(tokenizer, text, without_first_space)
    backend = _backend_without_space(tokenizer)
    if backend is None:
        ids: list[int] = tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )["input_ids"]
        return ids
    backend.encode_special_tokens = split_special_tokens
    return list(backend.encode(text, add_special_tokens=False).ids)


def without_first_space(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json `document` changed such that no space is added before a text."""

    def disable_prefix(part: Any) -> Any:
        match part:
            case {"type": "Sequence"}:
                parts = {key: value for key, value in part.items() if isinstance(value, list)}
                return part | {key: change_parts(value) for key, value in parts.items()}
            case {"type": "Metaspace"}:
                return part | {"prepend_scheme": "never"}
            case {"type": "ByteLevel"}:
                return part | {"add_prefix_space": False}
            case {"type": "Prepend"}:
                return None
        return part

    def change_parts(parts: list[Any]) -> list[Any]:
        return [
            changed_part for changed_part in map(disable_prefix, parts) if changed_part is not None
        ]

    keys = ("normalizer", "pre_tokenizer")
    return dict(document) | {key: disable_prefix(document.get(key)) for key in keys}


def _backend_without_space(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of the tokenizer's backend that adds no space before a text.

    None if the tokenizer adds no space, or is not from the package `tokenizers`.
    """
    if tokenizer not in _BACKENDS:
        _BACKENDS[tokenizer] = _copy_without_space(getattr(tokenizer, "backend_tokenizer", None))
    return _BACKENDS[tokenizer]


def _copy_without_space(backend: Tokenizer | None) -> Tokenizer | None:
    if backend is None:
        return None
    document = json.loads(backend.to_str())
    changed = without_first_space(document)
    if changed == document:
        return None
    copy = type(backend).from_str(json.dumps(changed))
    copy.no_truncation()
    copy.no_padding()
    return copy
