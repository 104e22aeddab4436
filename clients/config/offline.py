"""What training from stored rows is: a job file with `method.type = "offline"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from clients.config.common import Count, Name, Table, TeacherLink, TrainingJob


class OfflineData(Table):
    """The stored sequences."""

    path: Name
    """Directory that a capture made."""
    eval_path: str | None = None
    """Another one, held out. By default `eval.prompts` sequences are taken out of `path`."""
    eval_prompts: str | None = None
    """A .jsonl or .parquet file of prompts and answers, for `eval.metric`."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    answer_column: str = "answer"
    """Column with the reference answer."""
    template: str = "{prompt}"
    """The text given to the student; a model with a chat template gets it as the user's message."""


class OfflineConfig(Table):
    """Offline distillation: forward KL to rows that a capture stored, with no teacher running."""

    type: Literal["offline"]
    """The method."""
    tail: Literal["none", "bucket", "bucket+teacher_samples"] | None = None
    """As for `on_policy`. By default bucket+teacher_samples, or bucket where none are stored."""
    cross_entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight w of the stored token: the loss is KL + w * cross-entropy, at one temperature."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Head ids of the rows; a store with another number is refused. By default any."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Of student and teacher in the loss; a store of another one is refused. By default any."""
    teacher_fingerprint: str | None = None
    """Of the teacher's weights; a store of another one is refused. By default any."""
    on_policy_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a step's stored prompts that the student answers and the live teacher scores."""
    max_new_tokens: Count = 256
    """Tokens of one answer that the student writes."""


class OfflineJob(TrainingJob):
    """A job that trains from a store."""

    data: OfflineData
    method: OfflineConfig
    teacher: Annotated[TeacherLink | None, Field(validate_default=True)] = None
    """The live teacher; only `method.on_policy_fraction` needs one."""

    @field_validator("teacher")
    @classmethod
    def _is_there_if_needed(cls, teacher: TeacherLink | None, info: ValidationInfo) -> object:
        method = info.data.get("method")
        if method is not None and (method.on_policy_fraction > 0) != (teacher is not None):
            needed = "needs" if teacher is None else "is 0, so the job needs no"
            raise ValueError(f"method.on_policy_fraction {needed} teacher.address")
        return teacher

    @field_validator("data")
    @classmethod
    def _has_answers(cls, data: OfflineData, info: ValidationInfo) -> OfflineData:
        evaluation = info.data.get("eval")
        if evaluation is not None and evaluation.metric != "none" and data.eval_prompts is None:
            raise ValueError(f"eval.metric = {evaluation.metric!r} needs data.eval_prompts")
        return data

    @property
    def teacher_addresses(self) -> dict[str, str | list[str]]:
        """As OnPolicyJob's; empty where no teacher is needed."""
        return {} if self.teacher is None else {"": self.teacher.address}

    @property
    def sequences_per_step(self) -> int:
        """As OnPolicyJob's."""
        return self.train.prompts_per_step
