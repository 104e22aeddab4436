"""Computes the token ids of answers, and finds the tokens that end an answer.

Training and captures share these functions and therefore use the same token ids.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from clients.data.control_tokens import mark_names, mark_names_in
from clients.data.conversation import Conversation, has_content, is_learned, require_question
from clients.data.prompt_format import PromptFormat, plain_ids
from clients.data.template_parts import has_text, require_answer_text
from clients.data.tokens.continuation import continuation_ids
from protos.errors import InvalidInput


def completion_ids(prompt_format: PromptFormat, tokenizer: Any, answer: str) -> list[int]:
    """Return the token ids of an answer with an end token; [] for an empty answer.

    With a chat template, the end token is that of the template. Names of control tokens in the
    answer are encoded as plain text, except for a name at the end of the answer.

    Without a template, names of control tokens become control tokens, and the text after the first
    end token is removed.
    """
    if not answer:
        return []
    end = eos = tokenizer.eos_token_id
    marked = answer
    if prompt_format.renders(tokenizer):
        end = answer_end(tokenizer)
        marked = mark_names(tokenizer, answer, "an answer", is_answer=True)
    ids = continuation_ids(tokenizer, marked, has_placeholders=marked != answer)
    return _with_end(ids, end, eos)


def answered_ids(
    prompt_format: PromptFormat, tokenizer: Any, conversation: Conversation, location: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its answer. The answer has an end token.

    The answer is the last trained assistant message, and the prompt is everything before it. Later
    messages are ignored. Both lists are empty if no message is trained, or if the answer has no
    content.

    Raises InvalidInput if no message precedes the answer, or if the chat template renders the
    preceding messages differently with and without the answer.
    """
    conversation = conversation.up_to_answer()
    if not conversation.messages:
        return [], []
    require_question(conversation, location)
    if not has_content(conversation.messages[-1]):
        return [], []
    marked = mark_names_in(tokenizer, conversation, location)
    has_placeholders = marked is not conversation
    prompt = prompt_format.rendered(tokenizer, marked.unanswered(), location, add_answer_start=True)
    rendered = prompt_format.rendered(tokenizer, marked, location, add_answer_start=False)
    if not rendered.startswith(prompt):
        raise InvalidInput(
            f"the chat template changes the prompt of {location} when the answer is added",
            field="data.messages_column",
            hint="put prompt and answer into two columns",
        )
    answer_text = rendered.removeprefix(prompt)
    if not has_text(answer_text, marked.answer):
        # The prompt may already hold the beginning of the answer, such as <think>.
        question = prompt_format.rendered(
            tokenizer, marked.unanswered(), location, add_answer_start=False
        )
        # In a text that does not begin with it, other messages may have the text of the answer.
        answer_only = rendered.removeprefix(question) if rendered.startswith(question) else ""
        require_answer_text(marked.answer, answer_only, location)
    answer = continuation_ids(tokenizer, answer_text, has_placeholders=has_placeholders)
    with_end = _with_end(answer, answer_end(tokenizer), tokenizer.eos_token_id)
    return plain_ids(tokenizer, prompt, has_placeholders=has_placeholders), with_end


def assistant_ids(
    prompt_format: PromptFormat, tokenizer: Any, conversation: Conversation, location: str
) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the token ids of a conversation, and for each token whether it is trained.

    Trained tokens are those that the chat template marks with {% generation %}, and an end token
    that follows them. Tokens of messages that are not trained are excluded. The conversation is cut
    after the last trained token, and an end token is appended if none is there. Both results are
    empty if no message is trained.

    Raises InvalidInput if some assistant messages are not trained, and the template does not mark
    each assistant message exactly once.
    """
    conversation = conversation.up_to_answer()
    if not conversation.messages:
        return [], np.empty(0, bool)
    encoding = prompt_format.tokenized(tokenizer, conversation, location)
    ids = np.array(encoding["input_ids"])
    is_answer = np.array(encoding["assistant_masks"], dtype=bool)
    _unmark_messages(is_answer, conversation, location)
    end = answer_end(tokenizer)
    if end is not None:
        eos = tokenizer.eos_token_id
        is_end = np.isin(ids, [end] if eos is None else [end, eos])
        is_answer[1:] |= is_answer[:-1] & is_end[1:] & ~is_end[:-1]
    length = int(np.flatnonzero(is_answer).max(initial=-1)) + 1
    ids, is_answer = ids[:length], is_answer[:length]
    if length and end is not None and not is_end[length - 1]:
        ids, is_answer = np.append(ids, end), np.append(is_answer, True)
    return ids.tolist(), is_answer


def _unmark_messages(
    is_answer: NDArray[np.bool_], conversation: Conversation, location: str
) -> None:
    """Set `is_answer` to False, in place, for tokens of assistant messages that are not trained."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    learned = [is_learned(message) for message in answers]
    if all(learned):
        return
    edges = np.flatnonzero(np.diff(is_answer, prepend=False, append=False))
    if len(edges) != 2 * len(answers):
        raise InvalidInput(
            f"the chat template marks {len(edges) // 2} parts of {location}, which has"
            f" {len(answers)} assistant messages, so weight = 0 and train = false cannot be"
            f" applied",
            field="data.messages_column",
            hint="put one {% generation %} around each assistant message in the template, or remove"
            " the keys",
        )
    for first, end in edges.reshape(-1, 2)[~np.array(learned)]:
        is_answer[first:end] = False


def _with_end(ids: list[int], end: int | None, eos: int | None) -> list[int]:
    """Return `ids` up to and including the first end token, which is `end` or `eos`.

    If `ids` have no end token, `end` is appended.
    """
    for position, token_id in enumerate(ids):
        if token_id in (end, eos):
            return ids[: position + 1]
    return ids if end is None else [*ids, end]


_ANSWER = "zq"
# For each tokenizer: its chat template, and the end token in the template.
_TEMPLATE_ENDS: WeakKeyDictionary[Any, tuple[object, int | None]] = WeakKeyDictionary()


def answer_end(tokenizer: Any) -> int | None:
    """Return the id of the token that ends an answer; None if the tokenizer defines none.

    With a chat template, it is the first special token that the template writes after an answer,
    such as Gemma's <end_of_turn>, which differs from the end-of-sequence token.
    """
    template = tokenizer.chat_template
    if not template:
        eos: int | None = tokenizer.eos_token_id
        return eos
    cached = _TEMPLATE_ENDS.get(tokenizer)
    if cached is None or cached[0] != template:
        _TEMPLATE_ENDS[tokenizer] = cached = (template, _find_template_end(tokenizer))
    return cached[1]


def end_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the sorted ids of all tokens that end an answer of a model.

    These are the end tokens of the tokenizer, of its chat template, and of the model's generation
    config. Samplers stop at each of them, and an export lists all of them.
    """
    ends: set[int] = set()
    config_ends = getattr(generation_config, "eos_token_id", None)
    for ids in (tokenizer.eos_token_id, answer_end(tokenizer), config_ends):
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(ends)


def _find_template_end(tokenizer: Any) -> int | None:
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    eos: int | None = tokenizer.eos_token_id
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except Exception:  # noqa: BLE001 (a template may raise anything)
        return eos
    after_answer = text.rpartition(_ANSWER)[2]
    # Llama 3's <|eom_id|> and Phi's <|end|> are special tokens that the tokenizer does not name.
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    ids = tokenizer(after_answer, add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in ids if token_id in special_ids), eos)
