"""The token ids of answers: what the student learns, and what a capture scores.

Training and captures share these functions, so that both see the same token ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.conversation import Conversation, require_question
from clients.data.prompt_format import PromptFormat, plain_ids
from protos.errors import InvalidInput


def completion_ids(tokenizer: Any, answer: str) -> list[int]:
    """Return the token ids of an answer and its end token; [] for an empty answer."""
    return ended(plain_ids(tokenizer, answer), tokenizer) if answer else []


def answered_ids(
    form: PromptFormat, tokenizer: Any, conversation: Conversation, where: str
) -> tuple[list[int], list[int]]:
    """Return the token ids before the last assistant message, and those of it and its end token.

    Messages after it are left out. Both lists are empty if the assistant says nothing. Raises
    InvalidInput if nothing is before the message, or if the chat template changes what is before it
    once it is there.
    """
    conversation = conversation.up_to_answer()
    if not conversation.messages:
        return [], []
    require_question(conversation, where)
    prompt = form.rendered(tokenizer, conversation.unanswered(), where, ask=True)
    whole = form.rendered(tokenizer, conversation, where, ask=False)
    if not whole.startswith(prompt):
        raise InvalidInput(
            f"the chat template changes the prompt of {where} once its answer is added",
            field="data.messages_column",
            hint="put prompt and answer into two columns",
        )
    answer = plain_ids(tokenizer, whole.removeprefix(prompt))
    return plain_ids(tokenizer, prompt), ended(answer, tokenizer)


def assistant_ids(
    form: PromptFormat, tokenizer: Any, conversation: Conversation, where: str
) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the token ids of a conversation, and for each whether the assistant writes it.

    It writes those that the chat template marks with {% generation %}, and an end token after them.
    The conversation is cut after the last one, where an end token is appended if there is none.
    Both are empty if the assistant says nothing.
    """
    conversation = conversation.up_to_answer()
    if not conversation.messages:
        return [], np.empty(0, bool)
    encoded = form.tokenized(tokenizer, conversation, where)
    ids = np.array(encoded["input_ids"])
    marks = np.array(encoded["assistant_masks"], dtype=bool)
    end = tokenizer.eos_token_id
    if end is not None:
        marks[1:] |= marks[:-1] & (ids[1:] == end) & (ids[:-1] != end)
    length = int(np.flatnonzero(marks).max(initial=-1)) + 1
    ids, marks = ids[:length], marks[:length]
    if length and end is not None and ids[-1] != end:
        ids, marks = np.append(ids, end), np.append(marks, True)
    return ids.tolist(), marks


def ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Return `ids` up to the first end token; append one if there is none."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids
    return ids[: ids.index(end) + 1] if end in ids else [*ids, end]
