"""The configuration of `distill eval`: models, prompts, sampling, and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from clients.config.evaluation import EvalMethod, evaluated_data_rules
from clients.config.tables.common import Count, Name, Table
from clients.config.tables.data import DataConfig
from clients.config.tables.reward import RewardConfig
from clients.config.unused import refuse_unused


class ExamConfig(Table):
    """An evaluation. The command line passes this object to the evaluation program as JSON."""

    models: Mapping[Name, Name]
    """Models by display name: a Hugging Face directory, or the model name of the endpoint."""
    out: Name
    """Directory of the answers, with one subdirectory per model."""
    method: EvalMethod
    reward: RewardConfig
    data: DataConfig | None
    """The prompts. None: the prompts of the reward's task."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of the selection of prompts and of sampling."""
    endpoint: str | None = None
    """http://HOST:PORT/v1 of an OpenAI-compatible server. None: the models are directories."""
    api: Literal["chat", "completions"] = "chat"
    """API of the endpoint: chat completions or text completions."""
    in_flight: Count = 64
    """Maximum number of concurrent requests to the endpoint."""
    patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for one answer of the endpoint."""

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        has_template = self.endpoint is None or self.api == "chat"
        keeps_template = self.endpoint is None or self.api == "completions"
        return refuse_unused(
            self,
            [
                *evaluated_data_rules(self.data),
                (
                    has_template,
                    "data.messages_column data.system data.template_arguments",
                    "text completions have no chat template; use --api chat",
                ),
                (
                    keeps_template,
                    "data.chat_template",
                    "the endpoint applies its chat template; use --api completions",
                ),
            ],
        )
