"""The keys of offline training: a job file with `method.type = "offline"`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from clients.config.tables.common import Count, FittedTable, Name, Rule, refusal, refuse_unused
from clients.config.tables.data import DataFile, PromptKeys, prompt_rules
from clients.config.tables.job import TrainingJob
from clients.config.tables.rollouts import RolloutsConfig, rollout_rules
from clients.config.tables.teacher import TeacherLink, started_rules
from clients.data.object_urls import place_of
from clients.data.prompt_format import PromptFormat


class OfflineData(PromptKeys):
    """The stored sequences."""

    path: Name
    """Directory of the store that a capture wrote, or its URL: s3://BUCKET/PREFIX or gs://."""
    image_folder: Name | None = None
    """Folder of the images that the store names. Default: the folder of the captured data."""
    tokenizer: Name = "same"
    """same: only the student's tokenizer. auto: any. A directory or hub id: its tokenizer."""
    roles: dict[Name, Name] = {}  # noqa: RUF012 (pydantic copies it)
    """Counterparts of special tokens, student = store, if not detected; see docs/pairs.md."""
    prompts: Name | None = None
    """With another tokenizer: the captured data set, if its prompts are in a chat template."""
    eval_path: str | None = None
    """A held-out store. Default: `eval.prompts` sequences are taken out of `path`."""
    eval_prompts: str | None = None
    """Records with prompts and reference answers, as in `data.path` of `sft`, for `eval.metric`."""
    prompt_column: str = "prompt"
    """Column of `eval_prompts` and `prompts` with the prompt."""
    messages_column: Name | None = None
    """Column of `eval_prompts` and `prompts` with a conversation instead of a prompt."""
    answer_column: str = "answer"
    """Column of `eval_prompts` with the reference answer."""

    @field_validator("path", "eval_path")
    @classmethod
    def _is_a_place(cls, path: str | None) -> str | None:
        return path and place_of(path)

    @property
    def training_paths(self) -> list[tuple[str, str]]:
        """A list with one pair: the key of the training store in the job file, and its path."""
        return [("data.path", self.path)]

    @property
    def prompt_format(self) -> PromptFormat:
        """The format of the prompts in `eval_prompts`."""
        return self.format_of(self.prompt_column, self.messages_column)


class OfflineConfig(FittedTable):
    """Offline distillation: forward KL to the rows of a store, without a running teacher."""

    fitted = frozenset({"max_new_tokens"})
    type: Literal["offline"]
    """The method."""
    tail: Literal["none", "bucket", "bucket+teacher_samples"] | None = None
    """As for `on_policy`. Default: bucket+teacher_samples, or bucket without stored samples."""
    cross_entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight w of the cross-entropy of the stored tokens: loss = KL + w * cross-entropy."""
    match: Literal["row", "chunk", "word"] = "row"
    """With another tokenizer: row: head ids at word beginnings. chunk, word: likelihoods (ALM)."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Required number of head ids per stored row; other stores are refused. Default: any."""
    temperature: Annotated[float, Field(ge=1e-3)] | None = None
    """Required temperature of the stored rows; other stores are refused. Default: any."""
    teacher_fingerprint: str | None = None
    """Required fingerprint of the store's teacher; other stores are refused. Default: any."""
    on_policy_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a step's prompts that the student answers and `teacher.address` scores."""
    max_new_tokens: Count = 256
    """Maximum number of tokens of an answer that the student samples."""


class OfflineJob(TrainingJob):
    """An offline training job."""

    data: OfflineData
    method: OfflineConfig
    teacher: Annotated[TeacherLink | None, Field(validate_default=True)] = None
    """The running teacher service; only needed for `method.on_policy_fraction`."""
    rollouts: RolloutsConfig = RolloutsConfig()

    @field_validator("teacher")
    @classmethod
    def _check_presence(cls, teacher: TeacherLink | None, info: ValidationInfo) -> object:
        method = info.data.get("method")
        if method is not None and (method.on_policy_fraction > 0) != (teacher is not None):
            relation = "needs" if teacher is None else "is 0, so remove"
            raise ValueError(
                f"method.on_policy_fraction {relation} teacher.address or teacher.model"
            )
        return teacher

    @field_validator("data")
    @classmethod
    def _has_answers(cls, data: OfflineData, info: ValidationInfo) -> OfflineData:
        evaluation = info.data.get("eval")
        if evaluation is not None and evaluation.metric != "none" and data.eval_prompts is None:
            raise ValueError(f"eval.metric = {evaluation.metric!r} needs data.eval_prompts")
        return data

    @model_validator(mode="after")
    def _fits_tokenizers(self) -> Self:
        if self.data.tokenizer != "same" and self.method.on_policy_fraction > 0:
            remedy = "needs a store with the student's tokenizer; remove this key or data.tokenizer"
            raise refusal(self, "method.on_policy_fraction", remedy)
        return self

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        samples_answers = self.is_evaluated or self.method.on_policy_fraction > 0
        return refuse_unused(
            self,
            [
                (
                    self.is_evaluated,
                    "data.eval_prompts",
                    "only eval.metric = 'exact_match' uses these prompts; set eval.metric",
                ),
                *self._rules_of_columns(),
                (
                    samples_answers,
                    "method.max_new_tokens",
                    "the student samples no answers; remove the key, or set "
                    "method.on_policy_fraction or eval.metric",
                ),
                *prompt_rules(self.data),
                *started_rules(self.teacher),
                *self._rules_of_rollouts(),
            ],
        )

    def _rules_of_columns(self) -> list[Rule]:
        has_other_tokenizer = self.data.tokenizer != "same"
        has_eval_prompts, has_prompts = (
            self.data.eval_prompts is not None,
            self.data.prompts is not None,
        )
        same_tokenizer_hint = (
            "student and store have the same tokenizer; remove the key, or set data.tokenizer"
        )
        no_columns_hint = (
            "stored sequences have no columns; only data.eval_prompts and data.prompts use this key"
        )
        return [
            (
                has_eval_prompts or has_prompts,
                "data.prompt_column data.messages_column data.template data.template_arguments",
                no_columns_hint,
            ),
            (has_eval_prompts, "data.answer_column", no_columns_hint),
            (
                has_eval_prompts or has_other_tokenizer,
                "data.system data.chat_template",
                no_columns_hint,
            ),
            (has_other_tokenizer, "data.prompts data.roles method.match", same_tokenizer_hint),
            (
                not self.data.roles,
                "method.match",
                "data.roles needs the rows of every token; remove one of the two keys",
            ),
            (
                not has_other_tokenizer or bool(self.data.roles),
                "method.tail",
                "the tail is not used with another tokenizer; remove the key",
            ),
        ]

    def _rules_of_rollouts(self) -> list[Rule]:
        if self.method.on_policy_fraction > 0:
            return rollout_rules(self.rollouts)
        keys = " ".join(f"rollouts.{key}" for key in RolloutsConfig.model_fields)
        reason = "the student samples no training answers; remove the key, or set "
        return [(False, keys, f"{reason}method.on_policy_fraction")]

    @property
    def prompt_format(self) -> PromptFormat | None:
        """The format of the prompts in `data.eval_prompts`."""
        return None if self.data.eval_prompts is None else self.data.prompt_format

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of an answer. The prompts come from the store."""
        return self.method.max_new_tokens

    @property
    def answers_stored_prompts(self) -> bool:
        """Whether the student answers stored prompts, in steps or in evaluations."""
        return self.is_evaluated or self.method.on_policy_fraction > 0

    @property
    def answers_per_step(self) -> int:
        """Maximum number of stored prompts that the student answers per process and step."""
        answers = self.method.on_policy_fraction * self.train.prompts_per_step
        return math.ceil(answers / self.processes)

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data files that the job reads: `data.prompts`, and `data.eval_prompts` for
        `eval.metric`.
        """
        data, files = self.data, list[DataFile]()
        if data.prompts is not None:
            files.append(DataFile("data.prompts", data.prompts, prompts=data.prompt_format))
        if not self.is_evaluated or data.eval_prompts is None:
            return files
        return [
            *files,
            DataFile(
                "data.eval_prompts",
                data.eval_prompts,
                prompts=data.prompt_format,
                answers=True,
                answer_column=data.answer_column,
            ),
        ]

    @property
    def stores(self) -> Mapping[str, str]:
        """The training store, and the held-out store if the job has one."""
        held_out = {} if self.data.eval_path is None else {"data.eval_path": self.data.eval_path}
        return {"data.path": self.data.path, **held_out}
