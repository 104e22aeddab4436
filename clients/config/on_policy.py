"""The keys of on-policy distillation: a job file with `method.type = "on_policy"` (default)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from clients.config.tables.common import (
    Address,
    Count,
    FittedTable,
    Name,
    Tail,
    check_tail,
    refusal,
    refuse_unused,
)
from clients.config.tables.data import DataConfig, DataFile, columns_of, prompt_rules
from clients.config.tables.job import TrainingJob
from clients.config.tables.rollouts import RolloutsConfig, in_trainer_rules, rollout_rules
from clients.config.tables.teacher import (
    OtherTokens,
    RowRequest,
    TeacherConfig,
    other_tokens_rules,
    started_rules,
)
from clients.data.prompt_format import PromptFormat

# One literal: a union of two has two messages for one wrong value.
OnPolicyTail = Literal[Tail, "bucket+teacher_samples"]
# Default number of head ids: 16 with 48 draws from the tail (the best split of 64 ids, see
# docs/draws.md), 64 without draws.
TOP_K_WITH_DRAWS, TOP_K_WITHOUT_DRAWS = 16, 64


class OnPolicyTeacher(OtherTokens, TeacherConfig):
    """A teacher service and its row settings. Its tokenizer may differ from the student's."""


class OnPolicyConfig(FittedTable):
    """On-policy distillation: the student samples answers, the teacher scores every token."""

    fitted = frozenset({"max_prompt_tokens", "max_new_tokens"})
    type: Literal["on_policy"] = "on_policy"
    """The method."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """reverse_kl: KL(student||teacher). forward_kl: KL(teacher||student)."""
    head: Literal["student", "teacher"] = "student"
    """reverse_kl: whose top-k ids form the head. teacher: noisier, for services that score no given
    ids.
    """
    tail: OnPolicyTail | None = None
    """Estimator of the KL over the tail. Default: bucket+draws; forward_kl: bucket+teacher_samples.
    none, published and sampled are for reproduction.
    """
    horizon: Literal["word", "answer"] = "word"
    """With another tokenizer, a token gets the cost of its word, or of the whole rest (noisier).
    """
    rollouts_per_prompt: Count = 1
    """Answers sampled per prompt."""
    max_prompt_tokens: Count = 512
    """Longer prompts are skipped and counted. Unset: fits the context; see docs/jobs.md."""
    max_new_tokens: Count = 256
    """Maximum number of tokens of an answer. Unset: fits the context."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Temperature of sampling, and of student and teacher in the loss."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, values: Any) -> Any:
        """Drop the removed key `control_variate` if it has its default value.

        Jobs of an earlier version contain this key.
        """
        if isinstance(values, dict) and values.get("control_variate") is False:
            return {key: value for key, value in values.items() if key != "control_variate"}
        return values

    @field_validator("tail")
    @classmethod
    def _fits_divergence(cls, tail: str | None, info: ValidationInfo) -> str | None:
        divergence = info.data.get("divergence")
        if tail == "bucket+teacher_samples" and divergence == "reverse_kl":
            raise ValueError("needs divergence = 'forward_kl'; set divergence, or remove tail")
        if tail == "bucket+draws" and info.data.get("head") == "teacher":
            raise ValueError("needs head = 'student'; set head, or tail = 'bucket+sampled'")
        return check_tail(tail, divergence)

    @property
    def student_head(self) -> bool:
        """Whether the student chooses the head ids, which the trainer then sends to the teacher."""
        return self.divergence == "reverse_kl" and self.head == "student"

    @property
    def tail_mode(self) -> OnPolicyTail:
        """The tail mode for `topk_kl`: the key `tail`, or its default.

        The defaults are unbiased and have the least variance.
        """
        if self.tail is not None:
            return self.tail
        if self.divergence == "reverse_kl" and self.head == "teacher":
            return "bucket+sampled"
        return "bucket+draws" if self.divergence == "reverse_kl" else "bucket+teacher_samples"


class OnPolicyJob(TrainingJob):
    """An on-policy job. Three lines are enough: student.model, teacher.address, data.path."""

    samples = True
    aligns_tokens: ClassVar[bool] = True  # tokens of another tokenizer
    data: DataConfig
    teacher: OnPolicyTeacher = OnPolicyTeacher()
    teachers: dict[Name, Address] = {}  # noqa: RUF012 (pydantic copies it)
    """Addresses of several teachers by name, instead of `teacher.address`."""
    method: OnPolicyConfig = OnPolicyConfig()
    rollouts: RolloutsConfig = RolloutsConfig()

    @model_validator(mode="after")
    def _fits_tokenizers(self) -> Self:
        if self.teacher.tokenizer == "same":
            return self
        if self.method.divergence == "forward_kl" and not self.teacher.roles:
            remedy = "needs a teacher with the student's tokenizer; otherwise use reverse_kl"
            raise refusal(self, "method.divergence", remedy)
        if self.teachers:
            remedy = "has no effect: the job has `teachers`; remove one of the two keys"
            raise refusal(self, "teacher.tokenizer", remedy)
        return self

    @model_validator(mode="after")
    def _fits_images(self) -> Self:
        rules = [
            (self.teacher.tokenizer == "same", "teacher.tokenizer"),
            (self.teacher.context is None, "teacher.context"),
            (self.teacher.template_arguments is None, "teacher.template_arguments"),
        ]
        self._check_beside_images(self.data, [*rules, *in_trainer_rules(self.rollouts)])
        return self

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        has_several_teachers = bool(self.teachers)
        return refuse_unused(
            self,
            [
                (
                    not has_several_teachers,
                    "teacher.address teacher.model teacher.adapter",
                    "the job has `teachers`; remove one of the two keys",
                ),
                *started_rules(self.teacher),
                (
                    self.draws > 0 or self.tail_samples > 0,
                    "teacher.tail_draws",
                    f"method.tail = '{self.method.tail_mode}' uses no draws; remove one of the"
                    f" two keys",
                ),
                (
                    self.teacher.tokenizer != "same",
                    "method.horizon",
                    "only a teacher with another tokenizer uses this key; set teacher.tokenizer",
                ),
                (
                    self.method.divergence == "reverse_kl"
                    and (self.teacher.tokenizer == "same" or bool(self.teacher.roles)),
                    "method.head",
                    "only reverse_kl with one tokenizer uses this key; remove the key",
                ),
                (
                    not self.teacher.roles,
                    "method.horizon",
                    "teacher.roles needs the rows of every token; remove one of the two keys",
                ),
                *other_tokens_rules(self.teacher, chat_template=self.data.chat_template),
                (
                    has_several_teachers,
                    "data.teacher_column",
                    "the job has no table `teachers`; add the teachers to this table",
                ),
                (
                    self.is_evaluated,
                    "data.answer_column",
                    "only eval.metric = 'exact_match' uses reference answers; set eval.metric",
                ),
                *prompt_rules(self.data),
                *rollout_rules(self.rollouts),
            ],
        )

    @property
    def prompt_format(self) -> PromptFormat:
        """The format of the prompts."""
        return self.data.prompt_format

    @property
    def teacher_context(self) -> str:
        """Text before the prompt that only the teacher reads; "" means none."""
        return self.teacher.context or ""

    @property
    def top_k(self) -> int:
        """Head ids per row. The default is larger if rows have no ids drawn from the tail."""
        if self.teacher.top_k is not None:
            return self.teacher.top_k
        return TOP_K_WITH_DRAWS if self.draws or self.tail_samples else TOP_K_WITHOUT_DRAWS

    @property
    def draws(self) -> int:
        """Ids per row that the student draws from its own tail; 0 if the loss uses none."""
        return self.teacher.tail_draws if self.method.tail_mode == "bucket+draws" else 0

    @property
    def tail_samples(self) -> int:
        """Ids per row that the teacher samples from its tail; 0 if the loss uses none."""
        return self.teacher.tail_draws if self.method.tail_mode == "bucket+teacher_samples" else 0

    @property
    def teacher_addresses(self) -> Mapping[str, str | list[str]]:
        """The addresses of the teachers by name. A single teacher has the name ""."""
        return self.teachers or super().teacher_addresses

    @property
    def alignment_keys(self) -> Sequence[str]:
        """The keys set in the job that have an effect only if the tokens are aligned by bytes."""
        return () if self.method.horizon == "word" else ("method.horizon",)

    @property
    def row_request(self) -> RowRequest:
        """The rows that the job requests from its teachers."""
        return RowRequest(
            top_k=self.top_k,
            top_k_key="teacher.top_k",
            temperature=self.method.temperature,
            sequence_tokens=self.longest_sequence,
            answer_tokens=self.method.max_new_tokens,
            of_student=self.method.student_head,
            draws=self.draws,
            tail="bucket+sampled",
            teacher_head="set method.head = 'teacher', use 'forward_kl'",
            tail_samples=self.tail_samples,
        )

    @property
    def reads_all_columns(self) -> bool:
        """True if a teacher's prompt is rendered separately, and so may use any column."""
        return self.other_tokenizer or self.has_other_teacher_prompt

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.method.max_prompt_tokens + self.method.max_new_tokens

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data files with the prompts."""
        teacher_column = (("data.teacher_column", self.data.teacher_column),)
        return self.data.files(
            training_answers=False,
            held_out_answers=self.is_evaluated,
            columns=(
                *(teacher_column if self.teachers else ()),
                *columns_of("teacher.context", self.teacher.context),
            ),
        )
