"""The token with which a model ends an answer, from its tokenizer."""

from __future__ import annotations

from typing import Any

_ANSWER = "zq"


def answer_end(tokenizer: Any) -> int | None:
    """Return the id of the token that ends an answer; None if the tokenizer does not name one.

    With a chat template, it is the first special token that the template writes after an answer,
    such as Gemma's <end_of_turn>, which is not its end-of-sequence token.
    """
    return _end_in_template(tokenizer) if tokenizer.chat_template else tokenizer.eos_token_id


def _end_in_template(tokenizer: Any) -> int | None:
    from jinja2 import TemplateError

    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    eos_id: int | None = tokenizer.eos_token_id
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except (TemplateError, ValueError, TypeError):
        return eos_id
    text_after_answer = text.rpartition(_ANSWER)[2]
    special = set(tokenizer.all_special_ids)
    ids = tokenizer(text_after_answer, add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in ids if token_id in special), eos_id)
