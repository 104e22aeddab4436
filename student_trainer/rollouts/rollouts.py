"""The interface of the samplers of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.parallel.sharding import Replicated, Sharded


class Rollouts(Protocol):
    """Samples completions of prompts with the student.

    in_process: whether this process samples, inside `student.gathered()`; otherwise an engine does.
    """

    in_process: bool

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield the rollouts of the prompts, in order, in batches as they are finished.

        numbers[i]: the rollout number of prompts[i], which fixes its random numbers together with
        `seed`. `greedy`: take the most likely token instead of sampling.
        """


def sampling_context(
    student: Replicated | Sharded, rollouts: Rollouts
) -> AbstractContextManager[None]:
    """Collective. Return the context of `generate`: weights are gathered for this process only."""
    return student.gathered() if rollouts.in_process else nullcontext()
