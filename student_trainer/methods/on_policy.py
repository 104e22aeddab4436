"""The student writes the step: rollouts, and the teacher's rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from clients.config.on_policy import OnPolicyJob
from student_trainer.data.prompts import Prompt, PromptSet
from student_trainer.loop.step import one_update
from student_trainer.methods.method import Method, kl_evaluation, plain_rollouts
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from student_trainer.teachers.source import PendingRows, TeachersByName


class OnPolicySteps:
    """Every sequence of a step is the student's own. `held_out` also is this process's share."""

    def __init__(
        self,
        config: OnPolicyJob,
        accelerator: Accelerator,
        prompts: PromptSet,
        held_out: Sequence[Prompt],
        answers: ScoredRollouts,
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
        written = self._answers.gathered_to([chosen[i] for i in mine], [first + i for i in mine])
        self._answers.finish()
        return written

    def held_out(self) -> list[PendingRows]:
        """Always the same prompts and random numbers, so that two evaluations compare."""
        return self._answers.to(self._held_out, self._held_out_numbers)


def on_policy_method(
    config: OnPolicyJob,
    prompts: tuple[PromptSet, list[Prompt]],
    teachers: Mapping[str, Connection],
    accelerator: Accelerator,
    student: Replicated | Sharded,
    tokenizer: Any,
) -> Method:
    """Reverse KL is over the student's top-k, forward KL over the teacher's."""
    objective = DistillationObjective.on_policy(config.method, tuple(config.teachers))
    student_head = objective.direction == "reverse"
    rollouts = plain_rollouts(
        config,
        student,
        tokenizer,
        top_k=config.teacher.top_k if student_head else 0,
        temperature=objective.temperature,
    )
    remote = {
        name: RemoteTeacher(
            connection.client,
            top_k=None if student_head else config.teacher.top_k,
            temperature=objective.temperature,
            f32=config.teacher.logprob_format == "f32",
        )
        for name, connection in teachers.items()
    }
    answers = ScoredRollouts(student, rollouts, TeachersByName(remote), config.seed)
    training, held_out = prompts
    steps = OnPolicySteps(config, accelerator, training, held_out, answers)
    examined = held_out if config.eval.metric == "exact_match" else []
    evaluation = kl_evaluation(
        config, accelerator, objective, steps.held_out, examined, tokenizer, rollouts
    )
    return Method(objective, one_update(steps.of_step), evaluation)
