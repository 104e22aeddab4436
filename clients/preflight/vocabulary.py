"""The token ids that a student and its teacher have in common. Does not import torch.

Many models have more logits than their tokenizer has tokens; the extra logits are padding. Models
of one family may have different amounts of padding. Let V0 be the smaller number of logits. The two
models agree on the first V0 ids, and rows are computed from the softmax over the first V0 logits on
both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protos.errors import WrongState


class TeacherWidth(Protocol):
    """The logits of a teacher, which the info of a service or of an engine describes."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    @property
    def takes_vocab_size(self) -> bool:
        """Whether the teacher can exclude its last logits from the softmax."""


def common_ids(student_logits: int, teacher_logits: int, label: str, tokens: Sequence[str]) -> int:
    """Return V0, the number of common ids of a student and a teacher or store.

    `label`: the name of the teacher or store, for messages. `tokens`: the token of each id; "" for
    an unused id. Raises WrongState (`student.model`) if the numbers of logits differ, and an id of
    V0 or above has a token: such an id is not padding.
    """
    common = min(student_logits, teacher_logits)
    first_token_id = next(
        (token_id for token_id in range(common, len(tokens)) if tokens[token_id]), None
    )
    if student_logits != teacher_logits and first_token_id is not None:
        model_without_logit = "the student" if student_logits < teacher_logits else f"the {label}"
        raise WrongState(
            f"the student has logits for {student_logits} ids, the {label} for {teacher_logits},"
            f" but id {first_token_id} is the token {tokens[first_token_id]!r}, for which"
            f" {model_without_logit} has no logit",
            field="student.model",
            hint="use a student and a teacher whose numbers of logits differ only by padding",
        )
    return common


def other_tokenizer(difference: str, label: str) -> WrongState:
    """Return the error for a teacher whose tokenizer differs from the student's."""
    hint = f"use a student with the {label}'s tokenizer"
    if label == "teacher":  # a named teacher needs this tokenizer
        hint += ", or set teacher.tokenizer = 'auto' in an on_policy or rl job"
    return WrongState(difference, field="student.model", hint=hint)


def require_narrowing(teacher: TeacherWidth, common: int, label: str, field: str) -> None:
    """Raise WrongState if a teacher has more than `common` logits and cannot exclude the others."""
    if common < teacher.vocab_size and not teacher.takes_vocab_size:
        raise WrongState(
            f"the {label} has logits for {teacher.vocab_size} ids, but cannot exclude the"
            f" padding ids, {common} and above",
            field=field,
            hint="use the engine hf or vllm, and update the teacher to the version of this program",
        )
