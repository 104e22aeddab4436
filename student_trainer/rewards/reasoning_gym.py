"""Tasks of reasoning-gym: prompts that are made on the fly, and judged by their own scorers.

A question is named by two numbers, (seed, index), and made again wherever it is needed. Held-out
questions have the first indices; training takes the others, and leaves out whatever has the words
of a held-out one. Imports no torch.
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

# The library adds seed and index; together they stay below 2**32, numpy's largest seed.
_SEEDS = 1 << 31
# Some tasks make all of their questions at once, so that there must not be too many.
_CHUNK = 500
_FIRST_TRAINING_INDEX = 1 << 20
_QUESTIONS = 1 << 24
_ATTEMPTS = 64


@dataclass(frozen=True)
class TaskQuestion:
    """Its text and answer, and the fields by which `Task.score` knows it."""

    text: str
    answer: str
    fields: Mapping[str, int]


class Task:
    """One task of the library with its settings."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Raises InvalidInput for a task or a setting that the library does not have."""
        self._name = name
        self._options = dict(options)
        self._data = lru_cache(maxsize=4)(self._made)
        self._entry = lru_cache(maxsize=1024)(self._written)
        self._data(0, 0)

    def question(self, seed: int, index: int) -> TaskQuestion:
        """Always the same one for the same numbers."""
        entry = self._entry(seed, index)
        fields = {"seed": seed, "index": index}
        return TaskQuestion(str(entry["question"]), str(entry["answer"]), fields)

    def score(self, sample: RewardSample) -> float:
        """From 0 to 1, of what stands between <answer> tags, after '####', or of all."""
        seed, index = sample.fields["seed"], sample.fields["index"]
        data = self._data(seed, index // _CHUNK)
        return float(data.score_answer(self.said(sample), self._entry(seed, index)))

    def said(self, sample: RewardSample) -> str:
        """What counts of an answer."""
        from reasoning_gym.utils import extract_answer

        tagged: str | None = extract_answer(sample.text)
        return conclusion(sample.text) if tagged is None else tagged

    def _written(self, seed: int, index: int) -> dict[str, Any]:
        # list_functions draws from the global generator, which is the trainer's.
        before = random.getstate()
        random.seed(index)
        try:
            entry: dict[str, Any] = self._data(seed, index // _CHUNK)[index % _CHUNK]
        finally:
            random.setstate(before)
        return entry

    def _made(self, seed: int, chunk: int) -> Any:
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of its parts
                from reasoning_gym import create_dataset
                from reasoning_gym.factory import DATASETS
        except ImportError:
            from student_trainer.rewards.missing_package import missing

            raise missing("reasoning-gym", f"reasoning_gym:{self._name}", "gym") from None
        if self._name not in DATASETS:
            raise InvalidInput(
                f"reasoning-gym has no task {self._name!r}",
                field="reward.type",
                hint=f"it has {', '.join(sorted(DATASETS))}",
            )
        try:
            spread = seed * 2654435761 % _SEEDS  # neighbouring seeds have no question in common
            first = spread + chunk * _CHUNK
            return create_dataset(self._name, seed=first, size=_CHUNK, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise InvalidInput(
                f"{self._name} of reasoning-gym: {error}",
                field="reward.options",
                hint="see the task's configuration in reasoning-gym",
            ) from error


class TaskQuestions:
    """The questions of a job: `held_out`, and any number of others for training."""

    def __init__(
        self, task: Task, seed: int, held_out: int, *, fits: Callable[[str], bool] = bool
    ) -> None:
        """`fits`: whether a question may be asked at all. Raises InvalidInput where a task has not
        enough different ones.
        """
        self._task = task
        self._seed = seed
        self._fits = fits
        self.held_out: Sequence[TaskQuestion] = list(self._first(held_out))
        self._never = {question.text for question in self.held_out}

    def of_step(self, step: int, count: int) -> list[TaskQuestion]:
        """The `count` questions of optimizer step `step` (from 1), whatever ran before."""
        return [self._training((step - 1) * count + number) for number in range(count)]

    def _first(self, count: int) -> Iterator[TaskQuestion]:
        seen: set[str] = set()
        for index in range(min(_ATTEMPTS * count, _FIRST_TRAINING_INDEX)):
            if len(seen) == count:
                return
            question = self._task.question(self._seed, index)
            if question.text not in seen and self._fits(question.text):
                seen.add(question.text)
                yield question
        if len(seen) < count:
            raise self._too_few(f"{count} different prompts to hold out")

    def _training(self, number: int) -> TaskQuestion:
        for attempt in range(_ATTEMPTS):
            index = _FIRST_TRAINING_INDEX + number % _QUESTIONS + attempt * _QUESTIONS
            question = self._task.question(self._seed, index)
            if question.text not in self._never and self._fits(question.text):
                return question
        raise self._too_few("a prompt that is not held out")

    def _too_few(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"the task does not give {what} within its length",
            field="reward.options",
            hint="widen the task, hold out fewer (eval.prompts), or allow longer prompts",
        )
