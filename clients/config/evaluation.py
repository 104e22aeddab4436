"""The keys of an evaluation job (`method.type = "eval"`), and the settings of one evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from clients.config.tables.common import (
    Count,
    EvaluatedModel,
    FittedTable,
    ModelSettings,
    Name,
    Rule,
    Table,
    refuse_unused,
)
from clients.config.tables.data import DataConfig, DataFile, prompt_rules
from clients.config.tables.job import Extra, JobConfig
from clients.config.tables.reward import RewardConfig, check_prompt_source

RESULTS = "eval"  # directory of the answers and the results, in the run directory


class EvalMethod(FittedTable):
    """Evaluation: sample answers of a model and score them with a reward."""

    fitted = frozenset({"max_new_tokens"})
    type: Literal["eval"]
    """The method."""
    prompts: Count | None = None
    """Number of prompts, sampled by the seed; default: all."""
    samples: Count = 32
    """Answers per prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Sampling temperature; 0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    max_new_tokens: Count = 1024
    """Maximum number of tokens of an answer. Unset: at most half of the context."""


def evaluated_data_rules(data: DataConfig | None) -> list[Rule]:
    """Return the rules that refuse keys of `data` without effect in an evaluation."""
    return [
        *prompt_rules(data),
        (False, "data.mix data.weight_column", "only training uses this key; remove the key"),
        (False, "data.image_column", "an evaluation reads no images; remove the key"),
    ]


class EvalJob(JobConfig):
    """An evaluation of one model, the job of `distill eval`."""

    program = "student_trainer.exam.job"
    preview_program = ""
    max_steps: ClassVar[int] = 0  # counts answers: known only with the data
    student: EvaluatedModel
    method: EvalMethod
    reward: RewardConfig
    data: Annotated[DataConfig | None, Field(validate_default=True)] = None
    """The prompts. Omit the table if a reasoning_gym task generates the prompts."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the selection of prompts and of sampling."""

    @field_validator("data")
    @classmethod
    def _check_presence(cls, data: DataConfig | None, info: ValidationInfo) -> object:
        if "reward" in info.data:
            check_prompt_source(data, info.data["reward"])
        return data

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        return refuse_unused(
            self,
            [
                *evaluated_data_rules(self.data),
                (False, "data.teacher_column", "an evaluation has no teacher; remove the key"),
                (False, "data.eval_path", "an evaluation reads data.path; remove the key"),
                (
                    False,
                    "reward.length",
                    "only training uses this key; remove the key",
                ),
            ],
        )

    @property
    def answering_student(self) -> EvaluatedModel:
        """The model that is evaluated."""
        return self.student

    @property
    def extras(self) -> Sequence[Extra]:
        """The extra of the trainer, whose sampler generates the answers."""
        return [("train", "an evaluation", "method.type")]

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data file with the prompts. Empty if a reasoning_gym task generates the prompts."""
        answers = self.reward.needs_reference
        if self.data is None:
            return ()
        return self.data.files(training_answers=answers, held_out_answers=answers)

    def outputs(self, run: Path) -> Mapping[str, str | Path]:
        """Return the directory of the answers and the results. `run`: the run directory."""
        return {"results": run / RESULTS}


class ExamConfig(Table):
    """The settings of one evaluation. The command line passes them to the program as JSON."""

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
    student: ModelSettings = ModelSettings()
    """Settings of all models."""
    endpoint: str | None = None
    """http://HOST:PORT/v1 of an OpenAI-compatible server. None: the models are directories."""
    api: Literal["chat", "completions"] = "chat"
    """API of the endpoint: chat completions or text completions."""
    in_flight: Count = 64
    """Maximum number of concurrent requests to the endpoint."""
    patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for one answer of the endpoint."""

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data file with the prompts. Empty if a reasoning_gym task generates the prompts."""
        if self.data is None:
            return ()
        answers = self.reward.needs_reference
        files = self.data.files(training_answers=answers, held_out_answers=answers)
        return [replace(file, field="--data") for file in files]

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
                    self.endpoint is None,
                    "student.chat_template",
                    "the endpoint applies its chat template; remove the key",
                ),
                (
                    keeps_template,
                    "data.chat_template",
                    "the endpoint applies its chat template; use --api completions",
                ),
            ],
        )
