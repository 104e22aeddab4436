"""The token with which a model ends an answer, from its tokenizer."""

from __future__ import annotations

from typing import Any

_ANSWER = "zq"


def answer_end(tokenizer: Any) -> int | None:
    """Return the id of the token that ends an answer; None if the tokenizer does not name one.

    With a chat template, it is the first special token that the template writes after an answer,
    such as Gemma's <end_of_turn>, which is not its end-of-sequence token.
    """
    return _in_template(tokenizer) if tokenizer.chat_template else tokenizer.eos_token_id


def _in_template(tokenizer: Any) -> int | None:
    from jinja2 import TemplateError

    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    eos: int | None = tokenizer.eos_token_id
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except (TemplateError, ValueError, TypeError):
        return eos
    after = text.rpartition(_ANSWER)[2]
    special = set(tokenizer.all_special_ids)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return next((number for number in ids if number in special), eos)
