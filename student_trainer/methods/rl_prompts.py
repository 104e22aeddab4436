"""The prompts of a job that learns from rewards: its data's, or those that a task makes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clients.config.rl import RLJob
from clients.data.tokenization import prompt_ids
from student_trainer.data.prompts import Prompt, load_prompts
from student_trainer.rewards.reasoning_gym import Task, TaskQuestion, TaskQuestions

log = logging.getLogger(__name__)


class PromptSource(Protocol):
    """Any number of prompts."""

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of step `step` (from 1), whatever ran before."""


@dataclass(frozen=True)
class RLPrompts:
    """What is trained on and what is held out."""

    training: PromptSource
    held_out: Sequence[Prompt]


def load_rl_prompts(config: RLJob, tokenizer: Any) -> RLPrompts:
    """Raises InvalidInput as `load_prompts`, and for a task that there is not."""
    if config.data is None:
        return _generated(config, tokenizer)
    training, held_out, too_long = load_prompts(
        config.data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
        with_fields=True,
    )
    if too_long:
        log.warning("%d prompts are longer than method.max_prompt_tokens: left out", too_long)
    return RLPrompts(training, held_out)


def _generated(config: RLJob, tokenizer: Any) -> RLPrompts:
    assert config.reward is not None, "the job was checked"
    assert config.reward.task is not None, "the job was checked"
    template, most = config.reward.template, config.method.max_prompt_tokens

    def ids(text: str) -> list[int]:
        return prompt_ids(tokenizer, template.replace("{prompt}", text))

    def prompt(question: TaskQuestion) -> Prompt:
        tokens = np.array(ids(question.text), dtype=np.int32)
        return Prompt(tokens, question.answer, text=question.text, fields=question.fields)

    task = Task(config.reward.task, config.reward.options)
    questions = TaskQuestions(
        task, config.seed, config.eval.prompts, fits=lambda text: 0 < len(ids(text)) <= most
    )
    return RLPrompts(_Asked(questions, prompt), [prompt(one) for one in questions.held_out])


@dataclass(frozen=True)
class _Asked:
    questions: TaskQuestions
    prompt: Callable[[TaskQuestion], Prompt]

    def of_step(self, step: int, count: int) -> list[Prompt]:
        return [self.prompt(question) for question in self.questions.of_step(step, count)]
