"""The keys of supervised fine-tuning: a job file with `method.type = "sft"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from clients.config.tables.common import Count, FittedTable, refuse_unused
from clients.config.tables.data import DataConfig, DataFile, prompt_rules
from clients.config.tables.job import TrainingJob


class SFTConfig(FittedTable):
    """Supervised fine-tuning: cross-entropy of the reference answers; no teacher."""

    fitted = frozenset({"max_tokens", "max_new_tokens"})
    type: Literal["sft"]
    """The method."""
    train_on: Literal["last", "all"] = "last"
    """last: the last assistant message. all: all assistant messages; needs {% generation %}."""
    max_tokens: Annotated[int, Field(ge=2, lt=2**31)] = 2048
    """Longer sequences, prompt and answer, are skipped and counted. Unset: fits the context."""
    max_new_tokens: Count = 256
    """Maximum number of tokens of an answer that the student samples for `eval.metric`."""


class SFTJob(TrainingJob):
    """A supervised fine-tuning job."""

    data: DataConfig
    method: SFTConfig

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        has_conversations = self.data.messages_column is not None
        return refuse_unused(
            self,
            [
                (
                    self.is_evaluated,
                    "method.max_new_tokens",
                    "the student samples no answers; remove the key, or set eval.metric",
                ),
                (
                    has_conversations,
                    "method.train_on",
                    "a prompt has one answer; set data.messages_column, or remove the key",
                ),
                (
                    self.is_evaluated or not has_conversations,
                    "data.answer_column",
                    "the answers are messages of data.messages_column; remove the key",
                ),
                (
                    False,
                    "data.teacher_column",
                    "a job of method sft has no teacher; remove the key",
                ),
                (False, "data.image_column", "a job of method sft reads no images; remove the key"),
                *prompt_rules(self.data),
            ],
        )

    @property
    def learns_all_turns(self) -> bool:
        """Whether the student is trained on every assistant message, not only on the last."""
        return self.method.train_on == "all"

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.method.max_tokens

    @property
    def learns_from_head(self) -> bool:
        """Always false, because there is no teacher."""
        return False

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data files with the prompts and their answers."""
        return self.data.files(training_answers=True, held_out_answers=True, learns_answers=True)
