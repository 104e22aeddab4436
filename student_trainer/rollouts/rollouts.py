"""The interface of the samplers of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout


class Rollouts(Protocol):
    """Samples completions of prompts with the student."""

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield the rollouts of the prompts, in order, in batches as they are finished.

        numbers[i]: the rollout number of prompts[i], which fixes its random numbers together with
        `seed`. `greedy`: take the most likely token instead of sampling.
        """
