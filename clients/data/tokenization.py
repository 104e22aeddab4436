"""Tokenization of prompts and conversations with a transformers tokenizer.

Training and capture share these functions, so that both see the same token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.errors import InvalidInput

Turn = Mapping[str, str]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a prompt; with a chat template, the prompt is the user's message.

    A final end-of-sequence token is removed, because the completion follows.
    """
    if tokenizer.chat_template:
        return template_ids(tokenizer, [{"role": "user", "content": text}])
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def template_ids(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """Return the token ids of a conversation, up to the start of the assistant's next turn."""
    return plain_ids(tokenizer, rendered(tokenizer, turns, add_generation_prompt=True))


def rendered(tokenizer: Any, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
    """Return the text of a conversation, with the special tokens of the chat template.

    Raises InvalidInput if the template fails on the conversation.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        # transformers renders templates in a sandbox: a template that tries to reach Python
        # internals ends here too.
        raise InvalidInput(
            f"the model's chat template cannot be used: {error}",
            field="student.model",
            hint="correct chat_template.jinja in its directory, or choose another model",
        ) from error
    return text


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without adding special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


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
