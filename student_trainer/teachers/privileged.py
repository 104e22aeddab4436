"""Privileged context: text that only the anchor reads, before the prompt.

The text is a template over the columns of the data. If it contains the solution or feedback, the
anchor knows more than the student, and the student learns to answer without that knowledge
(self-distillation).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from student_trainer.data.rollout import Rollout

_COLUMN = re.compile(r"\{(\w+)\}")


def privileged_prompt(
    context: str, form: PromptFormat, tokenizer: Any, max_tokens: int | None = None
) -> Callable[[Rollout], Tensor]:
    """Return a function from a rollout to the prompt ids [P] int64 that the anchor reads.

    The ids are those of the student's prompt with `context` before it; in a conversation, before
    the last user message. `form`: the format of the student's prompts. `context` may contain
    {column} for every column of the data, and {prompt} and {answer} for the prompt and the
    reference answer, whatever their columns are called.

    The function raises InvalidInput if a column does not exist, or if its prompt and the completion
    together exceed `max_tokens` tokens (None: no limit).
    """

    def prompt(rollout: Rollout) -> Tensor:
        columns = {**rollout.fields, "prompt": rollout.text, "answer": rollout.answer}

        def value(match: re.Match[str]) -> str:
            if match[1] not in columns:
                raise InvalidInput(
                    f"the data has no column {match[1]!r}",
                    field="anchor.context",
                    hint=f"use one of these columns: {', '.join(sorted(columns))}",
                )
            return str(columns[match[1]])

        if form.messages_column is None:
            asked = form.asked(rollout.text)
        else:
            asked = form.conversation(rollout.fields, "the record").unanswered()
        ids = torch.tensor(form.ids(tokenizer, asked.prefixed(_COLUMN.sub(value, context))))
        length = len(ids) + len(rollout.completion)
        if max_tokens is not None and length > max_tokens:
            raise InvalidInput(
                f"with the context the anchor would read {length} tokens, but it can read only"
                f" {max_tokens}",
                field="anchor.context",
                hint="shorten the context, or lower method.max_new_tokens",
            )
        return ids

    return prompt
