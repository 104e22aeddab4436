"""What a teacher reads of a rollout: its own prompt, and its own ids of special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.data.prompt_format import PromptFormat, check_chat_template, template_text
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.data.rollout import Rollout
from student_trainer.teachers.privileged import privileged_prompt


@dataclass(frozen=True)
class Reading:
    """What a teacher reads in place of the student's token ids.

    prompt: returns the prompt ids [P] of a rollout; None: those of the student. ids [V0] int32: a
    permutation, the teacher's id of each of the student's; None: both have the same.
    """

    prompt: Callable[[Rollout], Tensor] | None = None
    ids: NDArray[np.int32] | None = None

    def tokens(self, rollout: Rollout) -> tuple[NDArray[np.int32], int]:
        """Return the ids [T] of a rollout that the teacher reads, and where its answer starts."""
        before = rollout.token_ids[: rollout.start] if self.prompt is None else self.prompt(rollout)
        answer = self.theirs(rollout.completion)
        return np.concatenate([before.numpy().astype(np.int32), answer]), len(before)

    def theirs(self, ids: Tensor) -> NDArray[np.int32]:
        """Return the teacher's ids of the student's, of any shape."""
        found = ids.numpy().astype(np.int32)
        return found if self.ids is None else self.ids[found]

    def ours(self, rows: RowBlock) -> RowBlock:
        """Return rows with the student's ids in place of the teacher's."""
        back, samples = self._back, rows.tail_sample_ids
        return replace(
            rows,
            head_ids=None if rows.head_ids is None else back[rows.head_ids],
            tail_sample_ids=None if samples is None else back[samples],
        )

    @cached_property
    def _back(self) -> NDArray[np.int32]:
        assert self.ids is not None, "otherwise rows have the ids of the student"
        return np.argsort(self.ids).astype(np.int32)


def reads_another_prompt(config: OnPolicyJob | RLJob) -> bool:
    """Return whether a teacher with the student's tokenizer reads another prompt."""
    arguments = None if config.teacher is None else config.teacher.template_arguments
    return bool(config.teacher_context) or arguments is not None


def teacher_prompt(
    config: OnPolicyJob | RLJob, tokenizer: Any, most: int | None = None
) -> Callable[[Rollout], Tensor]:
    """Return a function from a rollout to the prompt ids [P] int64 that the teacher reads.

    `tokenizer`: the teacher's. `most`: tokens that it reads. See `privileged_prompt`, which is
    given `teacher.context`. Raises InvalidInput as `teacher_form` does.
    """
    form = teacher_form(config, tokenizer)
    return privileged_prompt(config.teacher_context, form, tokenizer, most, reader="teacher")


def teacher_form(config: OnPolicyJob | RLJob, tokenizer: Any) -> PromptFormat:
    """Return the format of the teacher's prompts, with the arguments of its chat template.

    They are `teacher.template_arguments`, by default those of the student's that the template
    names. Raises InvalidInput if the template does not fit the keys of the job.
    """
    template = template_text(tokenizer.chat_template)
    assert config.teacher is not None, "it has prompts of its own"
    form, given = config.prompt_format, config.teacher.template_arguments
    if given is None:
        named = set(re.findall(r"[A-Za-z_]\w*", template or ""))
        given = {name: of for name, of in form.template_arguments.items() if name in named}
    form = replace(form, template_arguments=given)
    try:
        check_chat_template(form, template)
    except InvalidInput as error:
        if error.field == "data.template_arguments":
            error.field = "teacher.template_arguments"
        raise
    return form
