"""Privileged context: text before the prompt that only the anchor, or only the teacher, reads.

The text is a template over the columns of the data. If the text contains the solution or feedback,
its reader has more information than the student, and the student learns to answer without this
information (for the anchor, this is self-distillation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clients.data.conversation import with_context
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from student_trainer.data.sequence import Rollout


def privileged_prompt(
    context: str,
    prompt_format: PromptFormat,
    tokenizer: Any,
    max_tokens: int | None = None,
    *,
    reader: str = "anchor",
) -> Callable[[Rollout], Tensor]:
    """Return a function from a rollout to the prompt ids [P] int64 that `reader` reads.

    The ids are those of the student's prompt with `context` before it; in a conversation, before
    the last user message. `prompt_format`, `tokenizer`: of the reader's prompts. `context` may
    contain {column} for every column of the data, and {prompt} and {answer} for the prompt and the
    reference answer, whatever their columns' names. `reader`: the table of the job with the key
    `context`.

    The function raises InvalidInput if a column does not exist, or if its prompt and the completion
    together exceed `max_tokens` tokens (None: no limit).
    """
    field = f"{reader}.context"

    def prompt(rollout: Rollout) -> Tensor:
        columns = {**rollout.fields, "prompt": rollout.text, "answer": rollout.answer}
        if prompt_format.messages_column is None:
            conversation = prompt_format.conversation_of_text(rollout.text)
        else:
            conversation = prompt_format.conversation(rollout.fields, "the record").unanswered()
        if context:
            conversation = with_context(conversation, context, columns, field)
        ids = torch.tensor(prompt_format.ids(tokenizer, conversation))
        length = len(ids) + len(rollout.completion)
        if max_tokens is not None and length > max_tokens:
            raise InvalidInput(
                f"with {'the context' if context else 'its own prompt'} the {reader} would read"
                f" {length} tokens, more than its limit of {max_tokens}",
                field=field if context else "method.max_prompt_tokens",
                hint=("shorten the context" if context else "lower the value")
                + ", or lower method.max_new_tokens",
            )
        return ids

    return prompt
