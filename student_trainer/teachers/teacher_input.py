"""The input of a teacher whose prompts or ids of special tokens differ from the student's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.data.conversation import with_context
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.data.sequence import Rollout


@dataclass(frozen=True)
class TeacherInput:
    """Converts a rollout from the student's token ids to the input of the teacher.

    - prompt: returns the prompt ids [P] that the teacher reads for a rollout; None: the teacher
      reads the prompt of the student.
    - ids: [V0] int32, a permutation: the teacher's id for each id of the student; None: both have
      the same ids.
    """

    prompt: Callable[[Rollout], Tensor] | None = None
    ids: NDArray[np.int32] | None = None

    def tokens(self, rollout: Rollout) -> tuple[NDArray[np.int32], int]:
        """Return the ids [T] that the teacher reads for a rollout, and the index of the answer's
        first id.
        """
        prompt_ids = (
            rollout.token_ids[: rollout.start] if self.prompt is None else self.prompt(rollout)
        )
        answer = self.to_teacher_ids(rollout.completion)
        return np.concatenate([prompt_ids.numpy().astype(np.int32), answer]), len(prompt_ids)

    def to_teacher_ids(self, ids: Tensor) -> NDArray[np.int32]:
        """Convert ids of the student, of any shape, to ids of the teacher."""
        student_ids = ids.numpy().astype(np.int32)
        return student_ids if self.ids is None else self.ids[student_ids]

    def to_student_rows(self, rows: RowBlock) -> RowBlock:
        """Convert the ids in rows of the teacher to ids of the student."""
        student_ids, samples = self._student_ids, rows.tail_sample_ids
        return replace(
            rows,
            head_ids=None if rows.head_ids is None else student_ids[rows.head_ids],
            tail_sample_ids=None if samples is None else student_ids[samples],
        )

    @cached_property
    def _student_ids(self) -> NDArray[np.int32]:
        assert self.ids is not None, "the teacher has the ids of the student"
        return np.argsort(self.ids).astype(np.int32)


def teacher_prompt(
    config: OnPolicyJob | RLJob, tokenizer: Any, max_length: int | None = None
) -> Callable[[Rollout], Tensor]:
    """Return a function from a rollout to the prompt ids [P] int64 that the teacher reads.

    `tokenizer`: the teacher's tokenizer. `max_length`: the maximum number of tokens that the
    teacher reads; None: no limit. The prompt begins with `teacher.context`, see
    `privileged_prompt`. Raises InvalidInput in the same cases as `teacher_form`.
    """
    form = teacher_form(config, tokenizer)
    return privileged_prompt(config.teacher_context, form, tokenizer, max_length, reader="teacher")


def teacher_form(config: OnPolicyJob | RLJob, tokenizer: Any) -> PromptFormat:
    """Return the format of the teacher's prompts, with the arguments of its chat template.

    `tokenizer`: the teacher's tokenizer. The arguments are `teacher.template_arguments`. If this
    key is not set, they are the student's arguments that the teacher's template uses. Raises
    InvalidInput if the template does not support the keys of the job.
    """
    template = template_text(tokenizer.chat_template)
    assert config.teacher is not None, "only a teacher has other prompts"
    prompt_format, arguments = config.prompt_format, config.teacher.template_arguments
    if arguments is None:
        template_names = set(re.findall(r"[A-Za-z_]\w*", template or ""))
        arguments = {
            name: argument
            for name, argument in prompt_format.template_arguments.items()
            if name in template_names
        }
    prompt_format = replace(prompt_format, template_arguments=arguments)
    try:
        check_chat_template(prompt_format, template)
    except InvalidInput as error:
        if error.field == "data.template_arguments":
            error.field = "teacher.template_arguments"
        raise
    return prompt_format


def privileged_prompt(
    context: str,
    prompt_format: PromptFormat,
    tokenizer: Any,
    max_tokens: int | None = None,
    *,
    reader: str = "anchor",
) -> Callable[[Rollout], Tensor]:
    """Return a function from a rollout to the prompt ids [P] int64 that a teacher or anchor reads.

    The ids encode `context`, followed by the student's prompt. In a conversation, `context` is
    inserted before the last user message. If the context contains the solution or feedback, its
    reader knows more than the student. The student then learns to answer without this knowledge;
    with the anchor as the reader, this is self-distillation.

    - context: the text, in which {column} is replaced by the value of a column of the data.
      {prompt} and {answer} are replaced by the prompt and the reference answer, whatever their
      columns are called.
    - prompt_format, tokenizer: those of the model that reads the context.
    - max_tokens: the maximum number of tokens of the prompt and the completion together; None: no
      limit.
    - reader: the table of the job that has the key `context`, "teacher" or "anchor".

    The returned function raises InvalidInput if a column does not exist, or if the tokens exceed
    `max_tokens`.
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
            room = rollout.start - (length - max_tokens)
            raise InvalidInput(
                f"with {'the context' if context else 'its own prompt'} the {reader} would read"
                f" {length} tokens, more than its limit of {max_tokens}",
                field=field if context else "method.max_prompt_tokens",
                hint=f"set method.max_prompt_tokens to at most {room}"
                if room > 0
                else f"set method.max_new_tokens to at most {max_tokens - len(ids)}"
                if max_tokens > len(ids)
                else f"use a model that reads at least {length} tokens",
            )
        return ids

    return prompt
