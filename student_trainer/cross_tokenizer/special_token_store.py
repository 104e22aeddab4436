"""Reads the stored rows of a teacher whose tokenizer differs only in special tokens.

Each id of an answer and of a row is replaced by the student's id. `TeacherInput` does the same for
a live teacher. The prompt of an answer is rendered again with the student's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from clients.store.dataset import LogitDataset
from protos.errors import InvalidInput
from student_trainer.data.sequence import TokenSequence
from student_trainer.teachers.source import PendingRows, resolved
from student_trainer.teachers.teacher_input import TeacherInput

Ids = NDArray[np.int32]


class SpecialTokenStore:
    """Reads stored sequences and rows, and replaces the teacher's ids by the student's ids."""

    def __init__(
        self, ids: Ids, tokens: Sequence[str], prompts: Callable[[Ids], Ids | None] | None
    ) -> None:
        """Set up the reader.

        - ids [V]: the teacher's id of each student id; V is the number of ids that the rows cover.
        - tokens: the token of each id.
        - prompts: a function that returns the student's ids of a stored prompt, or None if they are
          unknown. If `prompts` is None, the tokens before the rows are plain text.
        """
        self.tokens = tokens
        self._teacher_input = TeacherInput(ids=ids)
        self._student_ids = np.argsort(ids).astype(np.int32)
        self._prompts = prompts

    def check(self, data: LogitDataset, label: str, longest: int | None) -> None:
        """Raise InvalidInput if a stored prompt is not known, or if a sequence has too many tokens.

        `longest`: maximum number of tokens that the student reads; None: no limit.
        """
        for index in range(len(data)):
            prompt_ids = self._student_prompt(data.prompt_ids(index))
            if prompt_ids is None:
                raise unknown_prompt_error(index, label)
            tokens = int(data.lengths[index])
            growth = len(prompt_ids) - len(data.prompt_ids(index))
            if longest is not None and tokens + growth > longest:
                raise InvalidInput(
                    f"sequence {index} of the {label} has {tokens + growth} tokens with the"
                    f" student's prompt, but the student can read only {longest}",
                    field="data.path",
                    hint=f"capture again with method.max_tokens = {longest - growth}",
                )

    def read(self, data: LogitDataset, index: int) -> PendingRows:
        """Read stored sequence `index`. Its rows are available at once, so nothing waits for them.

        Raises Corrupt if the bytes of the sequence are damaged.
        """
        entry, block = data.decoded(index)
        ids = np.frombuffer(entry.token_ids, "<i4")
        prompt_ids = self._student_prompt(ids[: entry.start].astype(np.int32))
        assert prompt_ids is not None, "check accepts only known prompts"
        token_ids = np.concatenate([prompt_ids, self._student_ids[ids[entry.start :]]]).astype(
            np.int64
        )
        sequence = TokenSequence(torch.from_numpy(token_ids), len(prompt_ids))
        return PendingRows(sequence, resolved(self._teacher_input.to_student_rows(block)))

    def _student_prompt(self, ids: Ids) -> Ids | None:
        return self._student_ids[ids] if self._prompts is None else self._prompts(ids)


def unknown_prompt_error(index: int, label: str) -> InvalidInput:
    """Return the error for a stored prompt that cannot be converted to the student's tokens."""
    return InvalidInput(
        f"the prompt of sequence {index} of the {label} cannot be converted to the student's"
        " tokens: data.prompts is not set or does not contain the prompt, and the prompt has a"
        " chat template",
        field="data.prompts",
        hint="set data.prompts and its columns to the captured data set",
    )
