"""The requests to a model, and the prompts that it refuses."""

from __future__ import annotations

import logging
from typing import Protocol

from protos.errors import DistillError
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.questions import Question

log = logging.getLogger(__name__)

Ask = tuple[Question, int]  # a question, and the number of the answer to sample


class Keep(Protocol):
    """Stores answers of a model: all of one call, or none."""

    def __call__(self, *answers: StoredAnswer) -> None:
        """Write `answers` to the disk."""
        ...


class Stopped(Exception):
    """The evaluation was asked to stop. The answers so far are on the disk."""


class Refusals:
    """The prompts that a model refused, each with its error: too long, or filtered by a server.

    Refused prompts end an evaluation only if the model has answered nothing else.
    """

    def __init__(self, *, answered: bool) -> None:
        """`answered`: whether the model has answered anything, now or in an earlier process."""
        self.answered = answered
        self._faults: dict[int, DistillError] = {}

    def __contains__(self, question: Question) -> bool:
        return question.number in self._faults

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, question: Question, fault: DistillError) -> None:
        """Record a refused prompt; its first error is kept."""
        self._faults.setdefault(question.number, fault)

    def conclude(self, model: str) -> None:
        """Log a warning about the refused prompts, if there are any.

        Raises the first error instead if the model has answered nothing.
        """
        if not self._faults:
            return
        first = next(iter(self._faults.values()))
        if not self.answered:
            raise first
        log.warning(
            "%s refused %d prompts, which count as wrong; first: %s", model, len(self), first
        )


def seed_of(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of answer `sample` to question `prompt`: 31 bits, which all servers take."""
    return (seed * 1_000_003 + prompt * 8191 + sample) % (1 << 31)
