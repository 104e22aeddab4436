"""What an answer is worth: the table `reward` of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from clients.config.common import Count, Name, Table

NAMED = ("exact_match", "word_match", "f1", "math", "regex", "python")
GENERATED = "reasoning_gym:"


class LengthPenalty(Table):
    """Answers lose what they are too long: DAPO's soft punishment (arXiv 2503.14476, eq. 13)."""

    free_tokens: Count
    """Answers of at most so many tokens lose nothing;"""
    max_tokens: Count
    """from there the loss grows evenly up to `weight` at so many."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """What the longest answers lose."""

    @field_validator("max_tokens")
    @classmethod
    def _is_longer(cls, most: int, info: ValidationInfo) -> int:
        if most <= info.data.get("free_tokens", 0):
            raise ValueError("must be more than free_tokens")
        return most


class RewardConfig(Table):
    """Who judges the answers."""

    type: Name
    """exact_match, word_match, f1, math, regex, python, or reasoning_gym:TASK."""
    pattern: Annotated[str | None, Field(validate_default=True)] = None
    """regex: its last match's group is compared with the reference; without a group, found is 1."""
    file: Annotated[str | None, Field(validate_default=True)] = None
    """python: file with `reward(prompt, answer, reference, fields)`; only for `distill run`."""
    options: Mapping[Name, bool | int | float | str] = {}
    """reasoning_gym: settings of the task, as its own documentation names them."""
    template: str = "{prompt}"
    """reasoning_gym: as `data.template`, around each generated prompt."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """For one answer; one that takes longer has no reward."""
    length: LengthPenalty | None = None
    """A table `length` takes reward from long answers."""

    @field_validator("type")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        generated = kind.startswith(GENERATED) and kind != GENERATED
        if not generated and kind not in NAMED:
            raise ValueError(f"must be one of {', '.join(NAMED)}, {GENERATED}TASK")
        return kind

    @field_validator("pattern", "file")
    @classmethod
    def _goes_with_its_type(cls, value: str | None, info: ValidationInfo) -> str | None:
        owner = {"pattern": "regex", "file": "python"}[str(info.field_name)]
        kind = info.data.get("type")
        if kind is not None and (kind == owner) != bool(value):
            raise ValueError(f"reward.type = '{owner}' needs it, and no other type takes it")
        return value

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern or "").groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if groups > 1:
            raise ValueError("must have at most one group; (?:...) is none")
        return pattern

    @field_validator("options", "template")
    @classmethod
    def _is_of_a_task(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("type") in NAMED and value not in ({}, "{prompt}"):
            raise ValueError(f"only reward.type = '{GENERATED}TASK' takes it")
        return value

    @property
    def task(self) -> str | None:
        """Of reasoning_gym; None where the prompts are the data's."""
        return self.type.removeprefix(GENERATED) if self.type.startswith(GENERATED) else None
