"""The table `reward` of a job file: the reward function that scores answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from clients.config.tables.common import Count, Name, Table

NAMED = ("exact_match", "word_match", "f1", "math", "regex", "python")
# These compare short texts and can neither hang nor raise, so they need no time limit.
HARMLESS = ("exact_match", "word_match", "f1")
GENERATED = "reasoning_gym:"


class LengthPenalty(Table):
    """A penalty for long answers: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    free_tokens: Count
    """Answers of at most this many tokens have no penalty."""
    max_tokens: Count
    """The penalty grows linearly from 0 at `free_tokens` to `weight` at this many tokens."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Largest penalty, subtracted from the reward."""

    @field_validator("max_tokens")
    @classmethod
    def _is_longer(cls, max_tokens: int, info: ValidationInfo) -> int:
        if max_tokens <= info.data.get("free_tokens", 0):
            raise ValueError("must be more than free_tokens")
        return max_tokens


class RewardConfig(Table):
    """The reward function."""

    type: Name
    """exact_match, word_match, f1, math, regex, python, or reasoning_gym:TASK."""
    pattern: Annotated[str | None, Field(validate_default=True)] = None
    """regex: compares the last match's group with the reference. Without a group, any match scores
    1.
    """
    file: Annotated[str | None, Field(validate_default=True)] = None
    """python: file with `reward(prompt, answer, reference, fields)`; only for `distill run`."""
    options: Mapping[Name, bool | int | float | str] = {}
    """reasoning_gym: options of the task, as named in the documentation of reasoning-gym."""
    template: str = "{prompt}"
    """reasoning_gym: text of the prompt, as `data.template`, for the generated prompts."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Seconds to score one answer; an answer that takes longer gets no reward."""
    length: LengthPenalty | None = None
    """The table `reward.length` penalises long answers."""

    @field_validator("type")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        is_generated = kind.startswith(GENERATED) and kind != GENERATED
        if not is_generated and kind not in NAMED:
            raise ValueError(f"must be one of {', '.join(NAMED)}, {GENERATED}TASK")
        return kind

    @field_validator("pattern", "file")
    @classmethod
    def _goes_with_its_type(cls, value: str | None, info: ValidationInfo) -> str | None:
        owner = {"pattern": "regex", "file": "python"}[str(info.field_name)]
        kind = info.data.get("type")
        if kind is not None and (kind == owner) != bool(value):
            raise ValueError(f"must be set if reward.type = '{owner}', and only then")
        return value

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern or "").groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        if groups > 1:
            raise ValueError("must have at most one group; write other groups as (?:...)")
        return pattern

    @field_validator("options", "template")
    @classmethod
    def _is_of_a_task(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("type") in NAMED and value not in ({}, "{prompt}"):
            raise ValueError(f"is only for reward.type = '{GENERATED}TASK'; remove the key")
        return value

    @property
    def needs_reference(self) -> bool:
        """Whether the reward compares answers with reference answers, from `data.answer_column`."""
        if self.task is not None or self.type == "python":
            return False
        return self.type != "regex" or re.compile(self.pattern or "").groups > 0

    @property
    def task(self) -> str | None:
        """The reasoning_gym task that generates the prompts; None if the prompts come from the
        data.
        """
        return self.type.removeprefix(GENERATED) if self.type.startswith(GENERATED) else None


def check_prompt_source(data: Table | None, reward: RewardConfig | None) -> None:
    """Check that exactly one source provides the prompts: `data`, or the task of `reward`.

    Raises ValueError if both or neither provide prompts.
    """
    is_generated = reward is not None and reward.task is not None
    if data is not None and is_generated:
        raise ValueError("the reward reasoning_gym:TASK generates its prompts; remove the key")
    if data is None and not is_generated:
        raise ValueError("missing; only the reward reasoning_gym:TASK generates its prompts")
