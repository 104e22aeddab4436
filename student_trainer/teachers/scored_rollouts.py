"""Rollouts with teacher rows. The teacher scores one batch while the next batch is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.rollouts import Rollouts, sampling_context
from student_trainer.teachers.source import PendingRows, TeacherSource

# Step (from 1) -> prompts and rollout numbers of this process; a prompt may occur several times.
PromptsOfStep = Callable[[int], tuple[Sequence[Prompt], Sequence[int]]]


class RolloutsOfSteps(Protocol):
    """Samples the rollouts of training steps, and requests their teacher rows."""

    def of_step(self, step: int, prompts_of_step: PromptsOfStep) -> list[PendingRows]:
        """Collective. Return this process's rollouts of `step`, one per prompt, with their pending
        rows.

        `prompts_of_step`: returns this process's prompts and rollout numbers of a step.
        """

    def metrics(self, step: int, pending_rows: Sequence[PendingRows]) -> dict[str, Tensor]:
        """Return (sum, number) of each metric of the rollouts of `step`; see `Step.metric_sums`."""


class ScoredRollouts:
    """Samples rollouts with the current weights, and requests their teacher rows."""

    def __init__(
        self,
        student: Replicated | Sharded,
        rollouts: Rollouts,
        teacher: TeacherSource,
        seed: int,
    ) -> None:
        self._student = student
        self._rollouts = rollouts
        self._teacher = teacher
        self._seed = seed

    def sample_and_score(
        self, prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> list[PendingRows]:
        """Sample one rollout per prompt, and request its rows. Does not wait for the rows.

        `numbers[i]`: the number of the rollout of `prompts[i]`; it determines the random numbers of
        the rollout. If this process samples, call this method inside `student.gathered()`, and then
        `finish` outside of it.
        """
        self._student.full.eval()
        return [
            PendingRows(rollout, self._teacher.score(rollout))
            for batch in self._rollouts.generate(prompts, numbers, seed=self._seed)
            for rollout in batch
        ]

    def of_step(self, step: int, prompts_of_step: PromptsOfStep) -> list[PendingRows]:
        """Collective. Sample the rollouts of `step` with the current weights, and request their
        rows.
        """
        with sampling_context(self._student, self._rollouts):
            return self.sample_and_score(*prompts_of_step(step))

    def metrics(self, step: int, pending_rows: Sequence[PendingRows]) -> dict[str, Tensor]:
        """Return {}: the current weights sampled the rollouts, so their age is not measured."""
        return {}

    def sample(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[Rollout]:
        """Collective. Sample one rollout per prompt, without requesting rows.

        `numbers`: see `sample_and_score`.
        """
        with sampling_context(self._student, self._rollouts):
            self._student.full.eval()
            batches = self._rollouts.generate(prompts, numbers, seed=self._seed)
            return [rollout for batch in batches for rollout in batch]

    def request_rows(self, rollouts: Sequence[Rollout]) -> list[PendingRows]:
        """Request the teacher rows of rollouts. Does not wait for the rows."""
        return [PendingRows(rollout, self._teacher.score(rollout)) for rollout in rollouts]

    def finish(self) -> None:
        """Collective. Call `finish` of the teacher source, after the last rollout of a step.

        Call this method outside `student.gathered()`. See `TeacherSource.finish`.
        """
        self._teacher.finish()
