"""Tasks of reasoning-gym, which generate prompts and score answers with their own scorers.

The numbers (seed, index) identify a question; the task can generate the question from them again.
Held-out questions have the first indices. Training questions have indices from 2**20 on. A training
question is skipped if its text is that of a held-out question. Does not import torch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from protos.errors import InvalidInput
from student_trainer.rewards.sample import RewardSample, conclusion

# The library adds seed and index; the sum must stay below 2**32, the limit of numpy's seeds.
_SEEDS = 1 << 31
# Some tasks generate a whole data set at once, so a data set must be small.
_CHUNK = 500
_FIRST_TRAINING_INDEX = 1 << 20
_QUESTIONS = 1 << 24
_ATTEMPTS = 64


@dataclass(frozen=True)
class TaskQuestion:
    """A question that a task has generated.

    fields: its seed and its index, from which `Task.score` generates the question again.
    """

    text: str
    answer: str
    fields: Mapping[str, int]


class Task:
    """A task of reasoning-gym, with its options."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Load the task.

        Raises InvalidInput if reasoning-gym is not installed, or if it rejects the name or an
        option.
        """
        self._name = name
        self._options = dict(options)
        self._data = lru_cache(maxsize=4)(self._create_data_set)
        self._entry = lru_cache(maxsize=1024)(self._generate_entry)
        self._data(0, 0)

    def question(self, seed: int, index: int) -> TaskQuestion:
        """Return question (seed, index). The same numbers always give the same question."""
        entry = self._entry(seed, index)
        fields = {"seed": seed, "index": index}
        return TaskQuestion(str(entry["question"]), str(entry["answer"]), fields)

    def score(self, sample: RewardSample) -> float:
        """Return the score of an answer's final text, in [0, 1], as the task's scorer computes it.

        `sample.fields` must contain the seed and the index of the question.
        """
        seed, index = sample.fields["seed"], sample.fields["index"]
        data = self._data(seed, index // _CHUNK)
        return float(data.score_answer(self.vote(sample), self._entry(seed, index)))

    def vote(self, sample: RewardSample) -> str:
        """Return the final answer in a text.

        The final answer is in <answer> tags. Without them, it is the text after '####'. Without
        '####', it is the whole text.
        """
        from reasoning_gym.utils import extract_answer

        tagged: str | None = extract_answer(sample.text)
        return conclusion(sample.text) if tagged is None else tagged

    def _generate_entry(self, seed: int, index: int) -> dict[str, Any]:
        # The task list_functions draws from Python's global generator, so seed and restore it.
        generator_state = random.getstate()
        random.seed(index)
        try:
            entry: dict[str, Any] = self._data(seed, index // _CHUNK)[index % _CHUNK]
        finally:
            random.setstate(generator_state)
        return entry

    def _create_data_set(self, seed: int, chunk: int) -> Any:
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # in its modules
                from reasoning_gym import create_dataset
                from reasoning_gym.factory import DATASETS
        except ImportError:
            from student_trainer.rewards.sample import missing_package

            raise missing_package("reasoning-gym", f"reasoning_gym:{self._name}", "gym") from None
        if self._name not in DATASETS:
            raise InvalidInput(
                f"reasoning-gym has no task {self._name!r}",
                field="reward.type",
                hint=f"use one of {', '.join(sorted(DATASETS))}",
            )
        try:
            seed_offset = seed * 2654435761 % _SEEDS  # neighbouring seeds share no question
            first_seed = seed_offset + chunk * _CHUNK
            return create_dataset(self._name, seed=first_seed, size=_CHUNK, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise InvalidInput(
                f"reasoning-gym rejects the options of {self._name}: {error}",
                field="reward.options",
                hint="see the configuration of the task in reasoning-gym",
            ) from error


class TaskQuestions:
    """The questions of a job: the fixed list `held_out`, and those of each training step."""

    def __init__(
        self, task: Task, seed: int, held_out: int, *, fits: Callable[[str], bool] = bool
    ) -> None:
        """Generate the list `held_out`.

        `held_out`: the number of its questions. `fits`: returns whether the text of a question can
        be used. Raises InvalidInput if the task has too few different questions that fit.
        """
        self._task = task
        self._seed = seed
        self._fits = fits
        self.held_out: Sequence[TaskQuestion] = list(self._generate_held_out(held_out))
        self._held_out_texts = {question.text for question in self.held_out}

    def of_step(self, step: int, count: int) -> list[TaskQuestion]:
        """Return the training questions of a step.

        `step`: the number of the step, from 1. `count`: the number of questions per step. The same
        numbers always give the same questions. Raises InvalidInput if all questions that the task
        generates are held out or do not fit.
        """
        return [self._training_question((step - 1) * count + number) for number in range(count)]

    def _generate_held_out(self, count: int) -> Iterator[TaskQuestion]:
        texts: set[str] = set()
        for index in range(min(_ATTEMPTS * count, _FIRST_TRAINING_INDEX)):
            if len(texts) == count:
                return
            question = self._task.question(self._seed, index)
            if question.text not in texts and self._fits(question.text):
                texts.add(question.text)
                yield question
        if len(texts) < count:
            raise self._build_error(f"{count} different prompts to hold out", len(texts))

    def _training_question(self, number: int) -> TaskQuestion:
        for attempt in range(_ATTEMPTS):
            index = _FIRST_TRAINING_INDEX + number % _QUESTIONS + attempt * _QUESTIONS
            question = self._task.question(self._seed, index)
            if question.text not in self._held_out_texts and self._fits(question.text):
                return question
        raise self._build_error("a prompt that is not held out")

    def _build_error(self, missing_questions: str, count: int = 0) -> InvalidInput:
        return InvalidInput(
            f"the task does not generate {missing_questions} within the allowed length",
            field="reward.options",
            hint=(f"set eval.prompts to at most {count // 2}, " if count > 1 else "")
            + "choose options with more questions, or raise method.max_prompt_tokens",
        )
