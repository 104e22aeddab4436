"""What a job learns from, and how it is examined: a function for each kind of distillation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from clients.config.kinds import AnyTraining
from clients.config.offline import OfflineJob
from clients.config.on_policy import DataConfig, JobConfig
from student_trainer.critic.advantages import Values
from student_trainer.data.captured_stores import Stores, without_copies
from student_trainer.data.order import permutation
from student_trainer.data.prompts import Prompt, PromptSet, load_prompts
from student_trainer.loop.evaluation import Evaluation, Examination
from student_trainer.loop.step import Objective as AnyObjective
from student_trainer.loop.step import Steps, one_update
from student_trainer.methods.offline import Mixture, StoredSteps, read
from student_trainer.methods.on_policy import Answers, OnPolicySteps
from student_trainer.objectives.distillation import Objective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.source import PendingRows, RemoteTeacher, TeachersByName

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Course:
    """`facts`: what a resume must find as it was."""

    objective: AnyObjective
    steps: Steps
    evaluation: Evaluation
    anchor: Anchor | None = None
    values: Values | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def on_policy_course(
    config: JobConfig,
    prompts: tuple[PromptSet, list[Prompt]],
    teachers: Mapping[str, Connection],
    accelerator: Accelerator,
    student: Replicated | Sharded,
    tokenizer: Any,
) -> Course:
    """Reverse KL is over the student's top-k, forward KL over the teacher's."""
    objective = Objective.on_policy(config.method, tuple(config.teachers))
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
    answers = Answers(student, rollouts, TeachersByName(remote), config.seed)
    training, held_out = prompts
    steps = OnPolicySteps(config, accelerator, training, held_out, answers)
    examined = held_out if config.eval.metric == "exact_match" else []
    evaluation = _evaluation(
        config, accelerator, objective, steps.held_out, examined, tokenizer, rollouts
    )
    return Course(objective, one_update(steps.of_step), evaluation)


def offline_course(
    config: OfflineJob,
    stores: Stores,
    examined: list[Prompt],
    teachers: Mapping[str, Connection],
    accelerator: Accelerator,
    student: Replicated | Sharded,
    tokenizer: Any,
) -> Course:
    """Forward KL, over the teacher's top-k as it was stored."""
    store, method = stores.training, config.method
    tail = method.tail or ("bucket+teacher_samples" if store.has_samples else "bucket")
    objective = Objective("forward", tail, store.temperature, method.cross_entropy)
    log.info("tail %s, temperature %g, top_k %d", tail, store.temperature, store.top_k)
    rollouts = plain_rollouts(config, student, tokenizer, top_k=0, temperature=store.temperature)
    mixture = None
    if config.teacher is not None:
        teacher = RemoteTeacher(
            teachers[""].client,
            top_k=store.top_k,
            temperature=store.temperature,
            f32=config.teacher.logprob_format == "f32",
        )
        answers = Answers(student, rollouts, teacher, config.seed)
        count = round(method.on_policy_fraction * config.sequences_per_step)
        mixture = Mixture(answers, min(max(count, 1), config.sequences_per_step))
    chosen, held_out = _split(config, stores)
    steps = StoredSteps(
        store.data,
        chosen,
        accelerator,
        seed=config.seed,
        per_step=config.sequences_per_step,
        last_step=config.max_steps,
        mixture=mixture,
    )
    aside = (stores.held_out or store).data
    mine = held_out[accelerator.process_index :: accelerator.num_processes]

    def read_held_out() -> list[PendingRows]:
        return [read(aside, int(index)) for index in mine]

    evaluation = _evaluation(
        config, accelerator, objective, read_held_out, examined, tokenizer, rollouts
    )
    facts = {"store": store.identity}
    return Course(objective, one_update(steps.of_step), evaluation, facts=facts)


def load_examined(config: OfflineJob, tokenizer: Any, longest: int) -> list[Prompt]:
    """The prompts of `eval.metric`, if it is asked for."""
    path = config.data.eval_prompts
    if config.eval.metric == "none" or path is None:
        return []
    data = DataConfig(
        path=path,
        eval_path=path,
        prompt_column=config.data.prompt_column,
        answer_column=config.data.answer_column,
        template=config.data.template,
    )
    _, examined, _ = load_prompts(
        data, tokenizer, held_out=config.eval.prompts, max_tokens=longest, seed=config.seed
    )
    return examined


def _split(config: OfflineJob, stores: Stores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sequences to learn from and the held-out ones: pure functions of the seed."""
    count = config.eval.prompts
    chosen = permutation(len(stores.training.data), config.seed, -1)
    other = stores.held_out
    if other is None:
        chosen, held_out = chosen[count:], chosen[:count]
    else:
        held_out = permutation(len(other.data), config.seed, -1)[:count]
    return without_copies(stores.training, chosen, other or stores.training, held_out), held_out


def plain_rollouts(
    config: AnyTraining,
    student: Replicated | Sharded,
    tokenizer: Any,
    *,
    top_k: int,
    temperature: float,
) -> HuggingFaceRollouts:
    return HuggingFaceRollouts(
        student.whole.model,
        tokenizer,
        top_k=top_k,
        temperature=temperature,
        max_new_tokens=config.method.max_new_tokens,
        # Sampling keeps no activations: it can take larger batches than training.
        batch_tokens=4 * config.train.tokens_per_micro_batch,
        bf16=config.student.dtype == "bfloat16",
    )


def _evaluation(
    config: AnyTraining,
    accelerator: Accelerator,
    objective: Objective,
    held_out: Callable[[], list[PendingRows]],
    examined: list[Prompt],
    tokenizer: Any,
    rollouts: HuggingFaceRollouts,
) -> Evaluation:
    return Evaluation(
        accelerator,
        objective,
        held_out,
        Examination(examined, accelerator, tokenizer, rollouts) if examined else None,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
