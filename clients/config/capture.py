"""The keys of a capture: a job file with `method.type = "capture"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from clients.config.tables.common import (
    Count,
    FittedTable,
    Name,
    Rule,
    StudentConfig,
    Table,
    refuse_unused,
)
from clients.config.tables.data import DataFile, LeftOutShare, PromptKeys, columns_of
from clients.config.tables.job import Extra, JobConfig
from clients.config.tables.teacher import TeacherConfig
from clients.data.object_urls import place_of
from clients.data.prompt_format import PromptFormat


class CaptureTeacher(TeacherConfig):
    """The teacher of a capture: a teacher service, or a model that the capture loads itself."""

    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 64
    """Head ids per row: the teacher's k most likely tokens. 0 needs `method.tail_samples` > 0."""

    model: str | None = None
    """Directory or hub id of a model to load; without it, the service at `address` scores."""


class CaptureData(PromptKeys):
    """The sequences to score, in the order of the data."""

    fitted = PromptKeys.fitted | {"form"}
    path: Name
    """Records: .jsonl, .json, .csv, .parquet, a pattern, a saved directory, or a hub id."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set, or of a saved directory with splits."""
    form: Literal["completion", "messages", "text"] = "completion"
    """completion: prompt and answer. messages: a conversation. text: packed. Unset: recognised."""
    prompt_column: str = "prompt"
    """Column with the prompt (form `completion`)."""
    answer_column: str = "answer"
    """Column with the answer; its tokens are scored (form `completion`)."""
    messages_column: str = "messages"
    """Column with the conversation; its last assistant turn is scored (form `messages`)."""
    image_column: Name | None = None
    """Column with the path of an image, or a list, as in `on_policy`; a running service scores."""
    text_column: str = "text"
    """Column with the document; every token is scored (form `text`)."""
    max_left_out: LeftOutShare = 0.2
    """The capture fails before scoring if a larger share of the records is skipped."""
    tokenizer: str | None = None
    """Directory or hub id; default: the tokenizer of `student.model` or `teacher.model`."""

    @property
    def prompt_format(self) -> PromptFormat:
        """The format of the prompts. A capture of plain text (form `text`) does not use it."""
        has_conversations = self.form == "messages"
        messages = self.messages_column if has_conversations else None
        return self.format_of(self.prompt_column, messages, self.image_column)


class RayConfig(Table):
    """Settings of a capture that runs several engines on a Ray cluster."""

    actors: Count | None = None
    """Number of engines; default: one per GPU of the cluster, or one without GPUs."""
    cpus_per_actor: Count = 1
    """CPUs per engine. The cluster needs one more free CPU."""


class CaptureConfig(FittedTable):
    """Capture: score a data set with a teacher, and store the rows for offline training."""

    fitted = frozenset({"max_tokens"})
    type: Literal["capture"]
    """The method."""
    store: str | None = None
    """Directory or URL (s3://BUCKET/PREFIX, gs://) of the rows; default: `store` in the run."""
    max_tokens: Annotated[int, Field(ge=2, lt=2**31)] = 2048
    """Longer sequences are skipped and counted. Length of packed text. Unset: fits the teacher."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Temperature of the teacher; offline training must use the same temperature."""
    tail_samples: Annotated[int, Field(ge=0, le=256)] = 0
    """Ids per row that the teacher samples from outside the head."""
    compress: bool = False
    """Compress rows with zstd: smaller files, slower reads."""
    shard: Annotated[str, Field(pattern=r"^\d{1,6}/\d{1,6}$")] = "0/1"
    """`i/n`: capture part i (from 0) of n; `distill store merge` joins the stores of all parts."""
    shard_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = 64 << 20
    """Bytes after which a file ends; a killed capture loses one file. Small captures have 16 small
    files.
    """
    ray: RayConfig | None = None
    """Even an empty table runs the capture on a Ray cluster ($RAY_ADDRESS)."""

    @field_validator("store")
    @classmethod
    def _is_a_place(cls, store: str | None) -> str | None:
        return store and place_of(store)

    @field_validator("shard")
    @classmethod
    def _check_index(cls, shard: str) -> str:
        index, count = map(int, shard.split("/"))
        if index >= count:
            raise ValueError("must be i/n with i from 0 to n - 1")
        return f"{index}/{count}"  # 01/16 becomes 1/16: stores compare this text

    @property
    def part(self) -> tuple[int, int]:
        """The key `shard` as two integers (i, n): this job captures part i of n."""
        index, count = map(int, self.shard.split("/"))
        return index, count

    def store_in(self, run: Path) -> str:
        """Return the directory or URL into which the job writes its rows.

        If the job captures one of several parts (key `shard`), the part has its own subdirectory.
        `run`: the run directory, used if the job names no store.
        """
        index, count = self.part
        full_store = self.store or str(run / "store")
        return full_store if count == 1 else f"{full_store.rstrip('/')}/shard-{index}-of-{count}"


class CaptureJob(JobConfig):
    """A capture job."""

    program = "teacher_service.capture"
    preview_program = "teacher_service.capture.preview"
    max_steps: ClassVar[int] = 0  # counts sequences: known only with the data
    data: CaptureData
    method: CaptureConfig
    teacher: CaptureTeacher = CaptureTeacher()
    student: StudentConfig | None = None
    """The student. Only its tokenizer and its number of logits are used."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the tail samples."""

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        return refuse_unused(self, [*self._rules_of_teacher(), *self._rules_of_data()])

    def _rules_of_teacher(self) -> list[Rule]:
        teacher = self.teacher
        return [
            (
                teacher.model is None,
                "teacher.address teacher.patience_seconds teacher.prefetch_mib teacher.adapter",
                "the capture loads teacher.model itself; remove one of the two keys",
            ),
            (
                teacher.model is not None,
                "teacher.engine teacher.dtype teacher.device teacher.max_batch_tokens teacher.gpus",
                "the teacher at teacher.address scores the tokens; remove the key, or set"
                " teacher.model",
            ),
            (
                False,
                "teacher.batch_invariant",
                "the capture loads teacher.model in its own process; remove the key",
            ),
            (
                teacher.model is not None,
                "method.ray",
                "each engine on Ray loads a model; set teacher.model to a directory or a hub id",
            ),
            (
                teacher.model is None,
                "data.image_column",
                "images are scored by a running service; set teacher.address in place of "
                "teacher.model",
            ),
        ]

    def _rules_of_data(self) -> list[Rule]:
        data = self.data
        return [
            (
                False,
                "student.chat_template",
                "a capture uses the chat template of its tokenizer; set data.tokenizer to a"
                " directory"
                " with the tokenizer and this template",
            ),
            (
                data.form == "completion",
                "data.prompt_column data.input_column data.answer_column data.template",
                "only data.form = 'completion' uses this key; remove the key, or set data.form",
            ),
            (
                data.form != "text",
                "data.system data.chat_template data.template_arguments data.image_column",
                "plain text has no chat template; remove the key, or set another data.form",
            ),
            (
                data.form != "text" and data.image_column is None,
                "teacher.context",
                "this text stands before prompts without images; remove the key",
            ),
            (
                data.chat_template,
                "data.system data.template_arguments data.image_column",
                "data.chat_template = false switches the chat template off; remove one of the"
                " two keys",
            ),
            (
                data.form != "messages",
                "data.chat_template",
                "data.form = 'messages' needs the chat template; remove one of the two keys",
            ),
            (
                data.form == "messages",
                "data.messages_column data.completion_column",
                "only data.form = 'messages' uses this key; remove the key, or set data.form",
            ),
            (
                data.form != "text",
                "data.max_left_out",
                "plain text is packed, so no text is too long; remove the key",
            ),
            (
                data.form == "text",
                "data.text_column",
                "only data.form = 'text' uses this key; remove the key, or set data.form",
            ),
        ]

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras (optional dependencies of the package) that the job needs: `teacher`, and
        `ray` for a capture on Ray.
        """
        ray = ("ray", "a capture on Ray", "method.ray")
        teacher = ("teacher", "a capture", "method.type")
        return [teacher, *([] if self.method.ray is None else [ray])]

    @property
    def gpus(self) -> int:
        """Number of GPUs of the engine: `teacher.gpus`, but at least 1.

        The number is 1 for a capture on Ray, because Ray assigns the GPUs of the engines.
        """
        return 1 if self.method.ray is not None else max(1, self.teacher.gpus or 1)

    @property
    def started_teacher(self) -> None:
        """Always None: a capture loads its model itself."""
        return None

    @property
    def copies_records(self) -> bool:
        """Always false: a capture reads its records once."""
        return False

    @property
    def teacher_addresses(self) -> Mapping[str, str | list[str]]:
        """The address of the teacher service. Empty if the capture loads the model."""
        loads_model = self.teacher.model is not None or self.method.ray is not None
        return {} if loads_model else super().teacher_addresses

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data set to score. The capture scores the tokens that a fine-tuning job would train
        on.
        """
        data, columns = self.data, columns_of("teacher.context", self.teacher.context)
        if data.form == "text":
            columns = (("data.text_column", data.text_column), *columns)
            return [DataFile("data.path", data.path, columns)]
        return [
            DataFile(
                "data.path",
                data.path,
                columns,
                data.prompt_format,
                answers=True,
                answer_column=data.answer_column,
                learns_answers=True,
            )
        ]

    def outputs(self, run: Path) -> Mapping[str, str | Path]:
        """Return the directory or URL of the rows. `run`: the run directory."""
        return {"store": self.method.store_in(run)}
