"""The tokens that end an answer: those of the tokenizer, its chat template and the model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

_ANSWER = "zq"
# By the tokenizer: its chat template, and the end in it.
_TEMPLATE_ENDS: WeakKeyDictionary[Any, tuple[object, int | None]] = WeakKeyDictionary()


def answer_end(tokenizer: Any) -> int | None:
    """Return the id of the token that ends an answer; None if the tokenizer does not name one.

    With a chat template, it is the first special token that the template writes after an answer,
    such as Gemma's <end_of_turn>, which is not its end-of-sequence token.
    """
    template = tokenizer.chat_template
    if not template:
        eos: int | None = tokenizer.eos_token_id
        return eos
    cached = _TEMPLATE_ENDS.get(tokenizer)
    if cached is None or cached[0] != template:
        _TEMPLATE_ENDS[tokenizer] = cached = (template, _find_template_end(tokenizer))
    return cached[1]


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of all tokens that end an answer of `model`, sorted.

    They are the end tokens of the tokenizer, of its chat template, and of the model's generation
    config. Samplers stop at each of them, and an export names them all.
    """
    ends: set[int] = set()
    config_ends = getattr(model.generation_config, "eos_token_id", None)
    for ids in (tokenizer.eos_token_id, answer_end(tokenizer), config_ends):
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(ends)


def _find_template_end(tokenizer: Any) -> int | None:
    from jinja2 import TemplateError

    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    eos: int | None = tokenizer.eos_token_id
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except (TemplateError, ValueError, TypeError):
        return eos
    after_answer = text.rpartition(_ANSWER)[2]
    # Llama 3's <|eom_id|> and Phi's <|end|> are special tokens that the tokenizer does not name.
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    ids = tokenizer(after_answer, add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in ids if token_id in special_ids), eos)
