"""From texts to token ids, by any tokenizer of transformers: training and capture agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.errors import InvalidInput

Turn = Mapping[str, str]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A prompt that is to be continued; with a chat template, as the user's message."""
    if tokenizer.chat_template:
        return template_ids(tokenizer, [{"role": "user", "content": text}])
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def template_ids(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """A conversation up to where the assistant is to speak."""
    return plain_ids(tokenizer, rendered(tokenizer, turns, add_generation_prompt=True))


def rendered(tokenizer: Any, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
    """The text of a conversation, with the special tokens that the template writes.

    Raises InvalidInput for a template that does not take it.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        # Rendered in a sandbox: a template that reaches for Python itself ends here too.
        raise InvalidInput(
            f"the model's chat template cannot be used: {error}",
            field="student.model",
            hint="correct chat_template.jinja in its directory, or choose another model",
        ) from error
    return text


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Of the text alone: no special token is added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def tokens_of(tokenizer: Any) -> list[str]:
    """The token of each id, "" for an unused one: what `tokenizer_fingerprint` takes."""
    return [tokenizer.convert_ids_to_tokens(i) or "" for i in range(len(tokenizer))]


def first_difference(
    teacher: Sequence[str], ours: Sequence[str], whose: str = "the student"
) -> str:
    """A sentence about the first id that means two things."""
    for token_id, (mine, theirs) in enumerate(zip(ours, teacher, strict=False)):
        if mine != theirs:
            return (
                f"the tokenizers differ: id {token_id} is {mine!r} to {whose} and {theirs!r} to"
                " the teacher"
            )
    return f"the tokenizers differ: {whose} has {len(ours)} tokens, the teacher {len(teacher)}"
