"""Loads the prompts of an RL job from its data set, or generates them with a reasoning-gym task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.data.images import ImageReader
from student_trainer.data.prompts import ALL_IDS, ModelIds, Prompt, load_prompts
from student_trainer.data.sequence import Rollout
from student_trainer.rewards.reasoning_gym import Task, TaskQuestion, TaskQuestions
from student_trainer.teachers.teacher_input import privileged_prompt


class PromptSource(Protocol):
    """An unlimited sequence of training prompts."""

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """Return the `count` prompts of `step` (from 1). They depend only on the two arguments."""


@dataclass(frozen=True)
class RLPrompts:
    """The training prompts and the held-out prompts of an RL job.

    epoch_size: number of prompts in one pass over the data; 0 if the prompts are generated.
    """

    training: PromptSource
    held_out: Sequence[Prompt]
    epoch_size: int = 0


def load_rl_prompts(
    config: RLJob,
    tokenizer: Any,
    reader: ImageReader | None = None,
    model_ids: ModelIds = ALL_IDS,
) -> RLPrompts:
    """Load the prompts of the job's data set, or set up its reasoning-gym task.

    `reader`: reads the images of the prompts; None without images.

    Raises InvalidInput if the data cannot be used (see `load_prompts`), or if the task does not
    exist, rejects its options, or cannot generate enough different prompts for the evaluation.
    """
    if config.data is None:
        return _generate_prompts(config, tokenizer)
    training, held_out = load_prompts(
        config.data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
        with_fields=config.reads_all_columns,
        reader=reader,
        model_ids=model_ids,
    )
    return RLPrompts(training, held_out, training.epoch_size)


def _generate_prompts(config: RLJob, tokenizer: Any) -> RLPrompts:
    assert config.reward is not None, "validation requires a reward"
    assert config.reward.task is not None, "validation requires a task"
    prompt_format, max_tokens = config.prompt_format, config.method.max_prompt_tokens

    def encode_text(text: str) -> list[int]:
        return prompt_format.ids(tokenizer, prompt_format.conversation_of_text(text))

    def build_prompt(question: TaskQuestion) -> Prompt:
        tokens = np.array(encode_text(question.text), dtype=np.int32)
        return Prompt(tokens, question.answer, text=question.text, fields=question.fields)

    task = Task(config.reward.task, config.reward.options)
    questions = TaskQuestions(
        task,
        config.seed,
        config.eval.prompts,
        fits=lambda text: 0 < len(encode_text(text)) <= max_tokens,
    )
    return RLPrompts(
        _TaskPrompts(questions, build_prompt),
        [build_prompt(question) for question in questions.held_out],
    )


@dataclass(frozen=True)
class _TaskPrompts:
    questions: TaskQuestions
    build_prompt: Callable[[TaskQuestion], Prompt]

    def of_step(self, step: int, count: int) -> list[Prompt]:
        return [self.build_prompt(question) for question in self.questions.of_step(step, count)]


def context_prompt(
    config: OnPolicyJob | RLJob, tokenizer: Any, max_positions: int | None
) -> Callable[[Rollout], Tensor] | None:
    """Return a function that builds the anchor's prompt for a rollout, with `anchor.context`.

    None if the job has no context. `max_positions`: maximum tokens of the model, None without a
    limit. See `privileged_prompt`.
    """
    if config.anchor_context is None:
        return None
    return privileged_prompt(config.anchor_context, config.prompt_format, tokenizer, max_positions)
