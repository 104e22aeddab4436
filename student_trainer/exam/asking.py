"""What a model is asked for, and the prompts that it would not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from protos.errors import DistillError
from student_trainer.exam.answer_store import Answer
from student_trainer.exam.questions import Question

log = logging.getLogger(__name__)

Ask = tuple[Question, int]  # answer number n to a question
Keep = Callable[[Answer], None]


class Refusals:
    """The prompts that could not be asked, each with its fault: one too long, say, or one that a
    server filters. They end an evaluation only where nothing else is answered.
    """

    def __init__(self, *, answered: bool) -> None:
        """`answered`: whether the model has answered anything, now or earlier."""
        self.answered = answered
        self._faults: dict[int, DistillError] = {}

    def __contains__(self, question: Question) -> bool:
        return question.number in self._faults

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, question: Question, fault: DistillError) -> None:
        self._faults.setdefault(question.number, fault)

    def conclude(self, model: str) -> None:
        """Raises the first fault where it is all that there is, and else says it."""
        if not self._faults:
            return
        first = next(iter(self._faults.values()))
        if not self.answered:
            raise first
        log.warning(
            "%s refused %d prompts, which count as not answered right: %s", model, len(self), first
        )


def seed_of(seed: int, prompt: int, sample: int) -> int:
    """Another one for each answer; within 31 bits, which every server takes."""
    return (seed * 1_000_003 + prompt * 8191 + sample) % (1 << 31)
