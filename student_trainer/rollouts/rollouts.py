"""The interface of what writes the student's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout


class Rollouts(Protocol):
    """Who writes the answers to prompts."""

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Rollouts of prompts [i], as rollout number numbers[i], in batches as they are done."""
