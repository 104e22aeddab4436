"""What only the anchor reads: a text over the sample's columns, before the prompt.

With the solution or a judgement in it, the anchor knows more than the student, who learns to answer
as if it did: self-distillation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clients.data.tokenization import prompt_ids
from protos.errors import InvalidInput
from student_trainer.data.rollout import Rollout

_COLUMN = re.compile(r"\{(\w+)\}")


def privileged_prompt(
    context: str, template: str, tokenizer: Any, max_tokens: int | None = None
) -> Callable[[Rollout], Tensor]:
    """The ids [P] int64 of `context` and then `template`, filled in for a rollout's sample.

    `context` has {columns} of the sample, {prompt} and {answer} whatever the data calls them;
    `template`: as data.template. Raises InvalidInput for a column that the sample does not have,
    and where prompt and answer are more than `max_tokens`.
    """

    def prompt(rollout: Rollout) -> Tensor:
        columns = {**rollout.fields, "prompt": rollout.text, "answer": rollout.answer}

        def value(match: re.Match[str]) -> str:
            if match[1] not in columns:
                raise InvalidInput(
                    f"there is no column {match[1]!r} in the data",
                    field="anchor.context",
                    hint=f"there are: {', '.join(sorted(columns))}",
                )
            return str(columns[match[1]])

        text = _COLUMN.sub(value, context) + template.replace("{prompt}", rollout.text)
        ids = torch.tensor(prompt_ids(tokenizer, text))
        length = len(ids) + len(rollout.completion)
        if max_tokens is not None and length > max_tokens:
            raise InvalidInput(
                f"with its context the anchor would read {length} tokens, it takes {max_tokens}",
                field="anchor.context",
                hint="shorten it, or lower method.max_new_tokens",
            )
        return ids

    return prompt
