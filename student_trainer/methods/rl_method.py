"""What a job with rewards learns from, and how it is examined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from student_trainer.critic.advantages import Values
from student_trainer.environments.retriever import Retriever
from student_trainer.loop.evaluation import Evaluation, Examination
from student_trainer.methods.method import Course, plain_rollouts
from student_trainer.methods.on_policy import Answers
from student_trainer.methods.rl import RLSteps, Unscored
from student_trainer.methods.rl_prompts import RLPrompts
from student_trainer.objectives.distillation import Objective
from student_trainer.objectives.rl import RLObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards import Rewards
from student_trainer.rewards.rollout_rewards import Judged
from student_trainer.rollouts.hf import Rollout, Rollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.rollouts.search import SearchRollouts
from student_trainer.teachers.anchor import Anchor, AnchorTeacher
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.privileged import privileged_prompt
from student_trainer.teachers.source import RemoteTeacher, TeacherSource


@dataclass(frozen=True)
class RLMaterial:
    """What was loaded before the weights. `most`: tokens that the student can read, if limited."""

    tokenizer: Any
    prompts: RLPrompts
    teachers: Mapping[str, Connection]
    rewards: Rewards | None
    retriever: Retriever | None
    most: int | None


def rl_course(
    config: RLJob, material: RLMaterial, accelerator: Accelerator, student: Replicated | Sharded
) -> Course:
    """Groups of answers, a reward for each, and a KL to a teacher, to the anchor, or to both."""
    method, rewards = config.method, material.rewards
    assert (rewards is None) == (config.reward is None), "the caller makes them"
    judged = None if rewards is None else Judged(rewards, material.tokenizer)
    rollouts = _rollouts(config, material, student)
    answers = Answers(student, rollouts, _teacher(config, material), config.seed)
    anchor = anchor_teacher = None
    if method.beta:
        tau, period = config.anchor.tau, config.anchor.update_period
        anchor = Anchor(student, tau=tau, update_period=period)
        anchor_teacher = _anchor_teacher(config, material, anchor, accelerator, student)
    values = None
    if method.advantages == "gae" and judged is not None:
        values = Values(accelerator, student, method, config.train.tokens_per_micro_batch)
    steps = RLSteps(config, accelerator, material.prompts, answers, judged, anchor_teacher, values)
    evaluation = Evaluation(
        accelerator,
        Objective(method.direction, "bucket+sampled", method.temperature),
        list if config.teacher is None else steps.held_out,
        Examination(
            material.prompts.held_out,
            accelerator,
            material.tokenizer,
            rollouts,
            matched=config.eval.metric == "exact_match",
            judged=judged,
        ),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
    return Course(RLObjective.of(config), steps.of_step, evaluation, anchor, values)


def _rollouts(config: RLJob, material: RLMaterial, student: Replicated | Sharded) -> Rollouts:
    method = config.method
    # Where the sampled token is all that counts, rows have a head still, of one id.
    top_k = max(method.top_k, 1)
    if config.environment is None:
        return plain_rollouts(
            config, student, material.tokenizer, top_k=top_k, temperature=method.temperature
        )
    assert material.retriever is not None, "the environment has one"
    return SearchRollouts(
        Sampler(
            student.whole.model,
            material.tokenizer,
            top_k=top_k,
            temperature=method.temperature,
            bf16=config.student.dtype == "bfloat16",
        ),
        material.tokenizer,
        material.retriever,
        config.environment,
        max_new_tokens=method.max_new_tokens,
        batch_tokens=4 * config.train.tokens_per_micro_batch,
    )


def _teacher(config: RLJob, material: RLMaterial) -> TeacherSource:
    if config.teacher is None:
        return Unscored()
    method = config.method
    return RemoteTeacher(
        material.teachers[""].client,
        top_k=None if method.direction == "reverse" else max(method.top_k, 1),
        temperature=method.temperature,
        f32=config.teacher.logprob_format == "f32",
    )


def _anchor_teacher(
    config: RLJob,
    material: RLMaterial,
    anchor: Anchor,
    accelerator: Accelerator,
    student: Replicated | Sharded,
) -> AnchorTeacher:
    """Its own head is of forward KL; beside a teacher it takes the teacher's."""
    method = config.method
    own_head = method.direction == "forward" and config.teacher is None
    return AnchorTeacher(
        anchor,
        student,
        accelerator,
        temperature=method.temperature,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        top_k=max(method.top_k, 1) if own_head else None,
        prompt=_context(config, material),
    )


def _context(config: RLJob, material: RLMaterial) -> Callable[[Rollout], Tensor] | None:
    if config.anchor.context is None:
        return None
    asked = config.data or config.reward
    assert asked is not None, "one of them has the prompts"
    return privileged_prompt(
        config.anchor.context, asked.template, material.tokenizer, material.most
    )
