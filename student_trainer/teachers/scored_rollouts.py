"""The student writes rollouts; a teacher scores each batch while the next is written."""

from __future__ import annotations

from collections.abc import Sequence

from student_trainer.data.prompts import Prompt
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.teachers.source import PendingRows, TeacherSource


class ScoredRollouts:
    """The student writes; the teacher reads each batch while the next is written."""

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

    def to(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[PendingRows]:
        """As rollout number numbers[i] to prompts[i]; inside `student.gathered()`."""
        self._student.whole.eval()
        return [
            PendingRows(rollout, self._teacher.score(rollout))
            for batch in self._rollouts.generate(prompts, numbers, seed=self._seed)
            for rollout in batch
        ]

    def gathered_to(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[PendingRows]:
        """The same from outside; every process must call it."""
        with self._student.gathered():
            return self.to(prompts, numbers)

    def finish(self) -> None:
        """Collective, outside `gathered()`, after the last rollout of a step; see TeacherSource."""
        self._teacher.finish()
