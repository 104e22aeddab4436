"""What `distill eval` asks of whom: models, prompts, a sampling, and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from clients.config.common import Count, DataConfig, Name, Table
from clients.config.reward import RewardConfig


class ExamConfig(Table):
    """An evaluation. Its program reads it as JSON."""

    models: Mapping[Name, Name]
    """By the name in the table: a Hugging Face directory, or what the endpoint calls the model."""
    out: Name
    """Directory of the answers, one subdirectory for each model."""
    reward: RewardConfig
    """Who judges."""
    data: DataConfig | None
    """The prompts; None: those of the reward's task."""
    prompts: Count | None
    """How many of them, chosen by the seed; None: all."""
    samples: Count
    """Answers to each prompt."""
    temperature: Annotated[float, Field(ge=0)]
    """Of the sampling; 0: the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Tokens are drawn from the likeliest that have this much probability together."""
    max_tokens: Count
    """Of one answer."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Of the choice of prompts, and of the sampling."""
    endpoint: str | None
    """http://HOST:PORT/v1 of an OpenAI-compatible server; None: the models are directories."""
    api: Literal["chat", "completions"]
    """What the endpoint is asked for."""
    in_flight: Count
    """Requests that wait for the endpoint at the same time."""
    patience_seconds: Annotated[float, Field(gt=0)]
    """For one answer of the endpoint."""
