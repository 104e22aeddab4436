"""The student writes the step: rollouts, and the teacher's rows of them."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from clients.config.on_policy import JobConfig
from student_trainer.data.prompts import Prompt, PromptSet
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.hf import Rollouts
from student_trainer.teachers.source import PendingRows, TeacherSource


class Answers:
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


class OnPolicySteps:
    """Every sequence of a step is the student's own. `held_out` also is this process's share."""

    def __init__(
        self,
        config: JobConfig,
        accelerator: Accelerator,
        prompts: PromptSet,
        held_out: Sequence[Prompt],
        answers: Answers,
    ) -> None:
        self._accelerator = accelerator
        self._prompts = prompts
        self._answers = answers
        self._prompts_per_step = config.train.prompts_per_step
        self._per_prompt = config.method.rollouts_per_prompt
        rank, world = accelerator.process_index, accelerator.num_processes
        self._held_out = held_out[rank::world]
        # Below the training rollouts' numbers, which count from 0.
        self._held_out_numbers = [-1 - i for i in range(len(held_out))][rank::world]

    def of_step(self, step: int) -> list[PendingRows]:
        chosen = [
            prompt
            for prompt in self._prompts.of_step(step, self._prompts_per_step)
            for _ in range(self._per_prompt)
        ]
        mine = range(self._accelerator.process_index, len(chosen), self._accelerator.num_processes)
        first = (step - 1) * len(chosen)
        return self._answers.gathered_to([chosen[i] for i in mine], [first + i for i in mine])

    def held_out(self) -> list[PendingRows]:
        """Always the same prompts and random numbers, so that two evaluations compare."""
        return self._answers.to(self._held_out, self._held_out_numbers)
