"""Escapes names of control tokens, such as <|im_end|>, inside the texts of a conversation.

A chat template writes control tokens between the texts of a conversation. Inside a text, the same
characters must be encoded as text: a user message about <|im_end|> must not end the turn, and an
answer about <|im_end|> must not train this token. `mark_names` replaces the names by placeholders
of the same length before the template is applied. `marked_ids` encodes the result: names written by
the template become control tokens, and placeholders become the characters of the names.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from clients.data.conversation import Conversation
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Private characters of Unicode, one for each control token: in its placeholder, and in the name
# that a copy of the tokenizer has for it.
_PLACEHOLDERS, _NAMES = 0xF0000, 0x100000
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")

Change = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class _ControlTokens:
    """The control tokens of a tokenizer.

    - names: the names of the control tokens, sorted.
    - pattern: matches any name; None if there are no names.
    - spelled: how often each name was part of a text and was read as characters.
    - backends: copies of the tokenizer whose control tokens have private names. The key is the
      change of tokenizer.json in the copy.
    """

    names: list[str]
    pattern: re.Pattern[str] | None
    spelled: Counter[str] = field(default_factory=Counter)
    backends: dict[Change | None, Tokenizer] = field(default_factory=dict)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> _ControlTokens:
        """Return the control tokens of a tokenizer.

        A tokenizer that is not from the package `tokenizers` has none here.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return cls([], None)
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {str(token) for token in added_tokens if token.special}
        ordered = sorted(names | set(tokenizer.all_special_tokens))
        # If several names have the same beginning, the longest name must match.
        longest_first = sorted(ordered, key=len, reverse=True)
        return cls(ordered, re.compile("|".join(map(re.escape, longest_first))) if names else None)


_CONTROL_TOKENS: WeakKeyDictionary[Any, _ControlTokens] = WeakKeyDictionary()


def mark_names(tokenizer: Any, text: str, location: str, *, is_answer: bool = False) -> str:
    """Return a text with placeholders instead of the names of control tokens.

    `location`: the place of the text, for messages. The first occurrence of each name is logged.
    `is_answer`: a name at the very end of the text is kept, because it ends the answer. Raises
    InvalidInput if the text contains private characters, which are reserved for placeholders.
    """
    control = _control_tokens_of(tokenizer)
    if control.pattern is None or control.pattern.search(text) is None:
        return text
    if _PRIVATE.search(text):
        raise _private_characters_error(location)
    matches = list(control.pattern.finditer(text))
    if is_answer and matches[-1].end() == len(text.rstrip()):
        matches.pop()
    marked, copied = "", 0
    for match in matches:
        name = match[0]
        control.spelled[name] += 1
        if control.spelled[name] == 1:
            log.warning(
                "%s has the text %r: it is read as these characters, not as the control token",
                *(location or "a conversation", name),
            )
        placeholder = chr(_PLACEHOLDERS + control.names.index(name)) * len(name)
        marked += text[copied : match.start()] + placeholder
        copied = match.end()
    return marked + text[copied:]


def count_spelled_names(tokenizer: Any) -> Counter[str]:
    """Return how often `mark_names` has replaced each name by a placeholder so far."""
    return Counter(_control_tokens_of(tokenizer).spelled)


def mark_names_in(tokenizer: Any, conversation: Conversation, location: str) -> Conversation:
    """Apply `mark_names` to every text of a conversation.

    If no text contains a name, the result is `conversation` itself, and private characters are
    allowed. If a text contains a name, private characters in any text raise InvalidInput.
    """
    has_placeholders = has_private_characters = False

    def mark(value: Any, *, is_answer: bool = False) -> Any:
        nonlocal has_placeholders, has_private_characters
        if isinstance(value, str):
            marked = mark_names(tokenizer, value, location, is_answer=is_answer)
            has_placeholders |= marked != value
            has_private_characters |= _PRIVATE.search(value) is not None
            return marked
        if isinstance(value, Mapping):
            return {
                key: mark(part, is_answer=is_answer and key == "text")
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            last = len(value) - 1
            return [
                mark(part, is_answer=is_answer and number == last)
                for number, part in enumerate(value)
            ]
        return value

    messages = [
        {
            key: mark(value, is_answer=key == "content" and message["role"] == "assistant")
            for key, value in message.items()
        }
        for message in conversation.messages
    ]
    tools = mark(conversation.tools)
    if not has_placeholders:
        return conversation
    if has_private_characters:
        raise _private_characters_error(location)
    return replace(conversation, messages=tuple(messages), tools=tools)


def marked_ids(tokenizer: Any, text: str, change: Change | None = None) -> list[int]:
    """Return the token ids of a text with placeholders. No special tokens are added.

    `change`: a function applied to the tokenizer.json document of the tokenizer before encoding.
    """
    return list(encode_marked(tokenizer, text, change).ids)


def encode_marked(tokenizer: Any, text: str, change: Change | None = None) -> Any:
    """Return the encoding (`tokenizers.Encoding`) of a text with placeholders.

    The offsets of the encoding refer to `text`. `change`: see `marked_ids`.
    """
    control = _control_tokens_of(tokenizer)
    if change not in control.backends:
        control.backends[change] = _with_private_names(tokenizer, control.names, change)

    def to_private_name(match: re.Match[str]) -> str:
        return _private_name(control.names.index(match[0]), match[0])

    def to_name(match: re.Match[str]) -> str:
        name = control.names[ord(match[0][0]) - _PLACEHOLDERS]
        return name * (len(match[0]) // len(name))

    assert control.pattern is not None, "only names of control tokens become placeholders"
    renamed = control.pattern.sub(to_private_name, text)
    plain = re.sub(r"([\U000f0000-\U000ffffd])\1*", to_name, renamed)
    return control.backends[change].encode(plain, add_special_tokens=False)


def _control_tokens_of(tokenizer: Any) -> _ControlTokens:
    if tokenizer not in _CONTROL_TOKENS:
        _CONTROL_TOKENS[tokenizer] = _ControlTokens.of_tokenizer(tokenizer)
    return _CONTROL_TOKENS[tokenizer]


def _private_characters_error(location: str) -> InvalidInput:
    return InvalidInput(
        f"{location} has private-use Unicode characters next to the name of a control token",
        field="data.path",
        hint="remove these characters from the row",
    )


def _private_name(number: int, name: str) -> str:
    return chr(_NAMES + number) * len(name)


def _with_private_names(tokenizer: Any, names: list[str], change: Change | None) -> Tokenizer:
    """Return a copy of the tokenizer. Each control token has a private name of the same length.

    `change`: see `marked_ids`.
    """
    backend = tokenizer.backend_tokenizer
    document = json.loads(backend.to_str())
    if change is not None:
        document = change(document)
    private_names = {name: _private_name(number, name) for number, name in enumerate(names)}
    for token in document["added_tokens"]:
        token["content"] = private_names.get(token["content"], token["content"])
    model = document["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {private_names.get(name, name): i for name, i in vocabulary.items()}
    else:
        model["vocab"] = [[private_names.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") in private_names:
        model["unk_token"] = private_names[model["unk_token"]]
    copy: Tokenizer = type(backend).from_str(json.dumps(document))
    copy.no_truncation()
    copy.no_padding()
    return copy
