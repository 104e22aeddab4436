"""The configuration of `distill eval`: models, prompts, sampling, and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from clients.config.tables.common import Count, Name, Table
from clients.config.tables.data import DataConfig, prompt_rules
from clients.config.tables.reward import RewardConfig
from clients.config.unused import Rule, refuse_unused

Temperature: TypeAlias = Annotated[float, Field(ge=0)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def evaluated_data_rules(data: DataConfig | None) -> list[Rule]:
    """Return the rules of keys of `data` that an evaluation has no use for."""
    return [
        *prompt_rules(data),
        (False, "data.mix data.weight_column", "it is for training; leave it out"),
        (False, "data.image_column", "an evaluation reads no images; leave it out"),
    ]


class ExamConfig(Table):
    """An evaluation. The CLI passes it to the evaluation program as JSON."""

    models: Mapping[Name, Name]
    """Models by display name: a Hugging Face directory, or the model name of the endpoint."""
    out: Name
    """Directory of the answers, with one subdirectory per model."""
    reward: RewardConfig
    """The reward function that scores the answers."""
    data: DataConfig | None
    """The prompts; None: the prompts of the reward's task."""
    prompts: Count | None
    """Number of prompts, sampled by the seed; None: all."""
    samples: Count
    """Answers per prompt."""
    temperature: Temperature
    """Sampling temperature; 0: greedy decoding."""
    top_p: TopP
    """Nucleus sampling: draw from the likeliest tokens with this total probability."""
    max_tokens: Count
    """Maximum number of tokens of an answer."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of the choice of prompts and of the sampling."""
    endpoint: str | None
    """http://HOST:PORT/v1 of an OpenAI-compatible server; None: the models are directories."""
    api: Literal["chat", "completions"]
    """API of the endpoint: chat completions or text completions."""
    in_flight: Count
    """Most concurrent requests to the endpoint."""
    patience_seconds: Annotated[float, Field(gt=0)]
    """Seconds to wait for one answer of the endpoint."""

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        uses_endpoint, data = self.endpoint is not None, self.data
        uses_text_api = uses_endpoint and self.api == "completions"
        return refuse_unused(
            self,
            [
                *evaluated_data_rules(data),
                (
                    not uses_text_api,
                    "data.messages_column data.system data.template_arguments",
                    "text completions have no chat template; use --api chat",
                ),
                (
                    not uses_endpoint or uses_text_api,
                    "data.chat_template",
                    "the endpoint applies its chat template; use --api completions",
                ),
            ],
        )
