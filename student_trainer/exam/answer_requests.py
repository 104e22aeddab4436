"""The requests to a model, and the prompts that it refuses."""

from __future__ import annotations

import logging
from typing import Protocol

from protos.errors import DistillError
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.questions import Question

log = logging.getLogger(__name__)

AnswerRequest = tuple[Question, int]  # a question, and the number of the answer to sample


class StoreAnswers(Protocol):
    """Stores all answers of a call, or none."""

    def __call__(self, *answers: StoredAnswer) -> None:
        """Write `answers` to the disk."""
        ...


class ExamStopped(Exception):
    """A stop of the evaluation was requested. Answers received until then are on disk."""


class Refusals:
    """The prompts that a model refused, each with its error, such as a too long prompt.

    Refused prompts end an evaluation only if the model has no answer at all.
    """

    def __init__(self, *, answered: bool) -> None:
        """`answered`: whether the model has answered anything, now or in an earlier process."""
        self.answered = answered
        self._errors: dict[int, DistillError] = {}

    def __contains__(self, question: Question) -> bool:
        return question.number in self._errors

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, question: Question, error: DistillError) -> None:
        """Record a refused prompt with its error; later errors of the prompt are ignored."""
        self._errors.setdefault(question.number, error)

    def conclude(self, model: str) -> None:
        """Log a warning about the refused prompts, if there are any.

        Raises the first error instead if the model has no answer.
        """
        if not self._errors:
            return
        first_error = next(iter(self._errors.values()))
        if not self.answered:
            raise first_error
        log.warning(
            "%s refused %d prompts, which count as wrong; first: %s", model, len(self), first_error
        )


def derive_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of answer `sample` to question `prompt`: 31 bits, which all servers take."""
    return (seed * 1_000_003 + prompt * 8191 + sample) % (1 << 31)
