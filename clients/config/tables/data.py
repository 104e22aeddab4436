"""The table `data` of a job file: the prompts, and the conversion of records to prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from pydantic import Field, field_validator

from clients.config.tables.common import FittedTable, Name, Rule, Table
from clients.data.conversation import columns_named
from clients.data.layouts import COLUMN_KEYS
from clients.data.prompt_format import PromptFormat

# Arguments that the program passes itself to the renderer of chat templates (transformers).
_RENDERING = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


# Column names by the keys that set them.
Columns: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DataFile:
    """A data file of a job, and the values that the job reads from its records.

    - field: the key of the job file that names the file.
    - path: the value of this key.
    - columns: required columns in addition to the columns of prompts.
    - prompts: the format of the prompts; None if the records are not prompts.
    - answers: whether reference answers are also read, from `answer_column` or from a conversation.
    - weight_column: column with the weight of a record; None if the job uses no weights.
    - learns_answers: whether the answers are trained on or captured. If so, the answers in a
      conversation are always its assistant messages.
    """

    field: str
    path: str
    columns: Columns = ()
    prompts: PromptFormat | None = None
    answers: bool = False
    answer_column: str = "answer"
    weight_column: str | None = None
    learns_answers: bool = False


def columns_of(key: str, context: str | None) -> Columns:
    """Return (key, column) for each column name in braces in `context`, the value of the key."""
    return tuple((key, column) for column in columns_named(context or ""))


def checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chat template unchanged.

    Raises ValueError if an argument has a name that the program sets itself.
    """
    for name in sorted(arguments.keys() & _RENDERING):
        raise ValueError(f"{name!r} is set by the program; remove the key")
    return arguments


class PromptKeys(FittedTable):
    """Keys that determine the token ids of a record's prompt."""

    fitted = frozenset(COLUMN_KEYS)
    input_column: Name | None = None
    """Column with a text that follows the prompt in a new line, such as `input` of Alpaca."""
    completion_column: Name | None = None
    """Column with messages after the messages of `messages_column`, such as `completion`."""
    template: str = "{prompt}"
    """Text of the student's prompt. With a chat template, the text becomes the user message."""
    system: Name | None = None
    """System message at the start of every prompt; needs a chat template."""
    chat_template: bool = True
    """false: use the text of the prompt without the tokenizer's chat template."""
    template_arguments: dict[Name, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments of the chat template, such as { enable_thinking = false }."""

    @field_validator("template_arguments")
    @classmethod
    def _are_of_the_template(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return checked_arguments(arguments)

    def format_of(
        self,
        prompt_column: str,
        messages_column: str | None,
        image_column: str | None = None,
    ) -> PromptFormat:
        """Return the prompt format for the given column of texts or of conversations."""
        return PromptFormat(
            prompt_column=prompt_column,
            messages_column=messages_column,
            image_column=image_column,
            input_column=self.input_column,
            completion_column=None if messages_column is None else self.completion_column,
            template=self.template,
            system=self.system,
            chat_template=self.chat_template,
            template_arguments=self.template_arguments,
        )


LeftOutShare = Annotated[float, Field(ge=0, le=1)]


class MixConfig(Table):
    """Another data set, mixed into the prompts of every step; it has the same columns."""

    path: Name
    """Records: .jsonl, .json, .csv, .parquet, a pattern, an s3:// or gs:// URL, or a hub id."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Share of the prompts of every step; the remaining prompts come from `data.path`."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""


class DataConfig(PromptKeys):
    """The prompts."""

    path: Name
    """Records: .jsonl, .json, .csv, .parquet, a pattern, an s3:// or gs:// URL, or a hub id."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    prompt_column: str = "prompt"
    """Column with the prompt. Unset: recognised, as for the next keys; see docs/jobs.md."""
    messages_column: Name | None = None
    """Column with a conversation instead: a list of {role, content}; see docs/jobs.md."""
    image_column: Name | None = None
    """Column with the image of the prompt, or a list: paths, or bytes; see docs/pairs.md."""
    answer_column: str = "answer"
    """Column with the reference answer; read by `eval.metric` and by rewards."""
    teacher_column: str = "teacher"
    """Column with the name of the prompt's teacher; used if the job has `teachers`."""
    weight_column: Name | None = None
    """Column with a number >= 0 that multiplies the loss of the record's sequences."""
    mix: tuple[MixConfig, ...] = ()
    """Other data sets, each { path, share, name, split }. The remaining prompts come from `path`.
    """
    max_left_out: LeftOutShare = 0.2
    """A job fails at its start if a larger share of 1,000 records of a data set is skipped."""
    eval_path: str | None = None
    """File of held-out prompts. Default: `eval.prompts` prompts are taken out of `path`."""

    @field_validator("mix")
    @classmethod
    def _check_share_sum(cls, mix: tuple[MixConfig, ...]) -> tuple[MixConfig, ...]:
        if sum(_exact_share(mixed.share) for mixed in mix) >= 1:
            raise ValueError("the shares must add up to less than 1; data.path has the rest")
        return mix

    def files(
        self,
        *,
        training_answers: bool,
        held_out_answers: bool,
        columns: Columns = (),
        learns_answers: bool = False,
    ) -> list[DataFile]:
        """Return the files of the training prompts and of the held-out prompts; see `DataFile`.

        `training_answers`, `held_out_answers`: whether the job reads their reference answers.
        """
        prompts = DataFile(
            "data.path",
            self.path,
            columns,
            self.prompt_format,
            training_answers,
            self.answer_column,
            self.weight_column,
            learns_answers,
        )
        files = [replace(prompts, field=key, path=path) for key, path in self.training_paths]
        held_out = replace(prompts, answers=held_out_answers)
        if self.eval_path is None:  # the held-out prompts are taken out of `path`
            return [held_out if held_out_answers else files[0], *files[1:]]
        field = "data.eval_path"
        return [*files, replace(held_out, field=field, path=self.eval_path, weight_column=None)]

    @property
    def training_paths(self) -> list[tuple[str, str]]:
        """Pairs (key in the job file, path) for the data sets with the training prompts."""
        mixed_paths = [
            (f"data.mix.{number}.path", mixed_set.path) for number, mixed_set in enumerate(self.mix)
        ]
        return [("data.path", self.path), *mixed_paths]

    @property
    def shares(self) -> list[Fraction]:
        """The shares of `path` and of the entries of `mix`. Their sum is 1."""
        mixed_shares = [_exact_share(mixed.share) for mixed in self.mix]
        return [1 - sum(mixed_shares, Fraction(0)), *mixed_shares]

    @property
    def prompt_format(self) -> PromptFormat:
        """The format of the prompts."""
        return self.format_of(self.prompt_column, self.messages_column, self.image_column)


def _exact_share(share: float) -> Fraction:
    """Return the decimal number exactly as in the job file, not its nearest binary fraction."""
    return Fraction(str(share))


def prompt_rules(data: PromptKeys | None) -> list[Rule]:
    """Return the rules about mutually exclusive keys of `data`, for `refuse_unused`."""
    has_conversations = getattr(data, "messages_column", None) is not None
    return [
        (
            data is None or data.chat_template,
            "data.messages_column data.system data.template_arguments data.image_column",
            "data.chat_template = false switches the chat template off; remove one of the two keys",
        ),
        (
            not has_conversations,
            "data.prompt_column data.input_column data.template",
            "the prompts are the conversations of data.messages_column; remove one of the two keys",
        ),
        (
            has_conversations,
            "data.completion_column",
            "it continues the conversations of data.messages_column; set this key too",
        ),
    ]
