"""What a capture is: the model of a job file with `method.type = "capture"`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from clients.config.common import (
    Count,
    Name,
    Priority,
    ResourcesConfig,
    StudentConfig,
    Table,
    TeacherConfig,
)


class CaptureTeacher(TeacherConfig):
    """Who scores: a running service, or a model that the capture loads itself."""

    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 64
    """Head ids of a row: the teacher's likeliest tokens; 0 where tail samples stand for all."""

    model: str | None = None
    """Directory or hub id of a model to load here; without it the service at `address` scores."""
    engine: Literal["hf", "vllm", "fake"] = "hf"
    """What runs `model`, as the option of `distill-teacher`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights of `model`; auto: as saved."""
    device: str = "auto"
    """Of `model`: auto, cpu, cuda, cuda:1."""
    max_batch_tokens: Count = 16384
    """Padded tokens of one forward pass of `model`."""


class CaptureData(Table):
    """The sequences, one after the other in the order of the data."""

    path: Name
    """A .jsonl or .parquet file, a directory made by `save_to_disk`, or a hub data set id."""
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set, or of a saved one."""
    form: Literal["completion", "messages", "text"] = "completion"
    """Prompt and answer, a conversation, or plain text packed to `method.max_tokens`."""
    prompt_column: str = "prompt"
    """Column with the prompt (form `completion`)."""
    answer_column: str = "answer"
    """Column with the completion, whose tokens are scored (form `completion`)."""
    template: str = "{prompt}"
    """The text before the completion; with a chat template, the user's message."""
    messages_column: str = "messages"
    """Column with the conversation, whose last assistant turn is scored (form `messages`)."""
    text_column: str = "text"
    """Column with the document, whose every token is scored (form `text`)."""
    tokenizer: str | None = None
    """Directory or hub id; by default that of `student.model`, or of `teacher.model`."""


class RayConfig(Table):
    """An engine on each of several GPUs or machines."""

    actors: Count | None = None
    """Engines; by default one a GPU of the cluster, or one where there is none."""
    cpus_per_actor: Count = 1
    """CPUs that an engine is given. One CPU more must be free in the cluster."""


class CaptureConfig(Table):
    """Capture: a teacher's rows of a data set, stored to learn from without a teacher."""

    type: Literal["capture"]
    """The method."""
    store: str | None = None
    """Directory of the rows; by default `store` in the run directory."""
    max_tokens: Annotated[int, Field(ge=2, lt=2**31)] = 2048
    """Longer sequences are left out, and counted; plain text is cut to it."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the teacher; students must use the same."""
    tail_samples: Annotated[int, Field(ge=0, le=256)] = 0
    """Ids that the teacher draws from outside the head of each row."""
    compress: bool = False
    """Rows in fewer bytes (zstd), which take longer to read."""
    shard: Annotated[str, Field(pattern=r"^\d{1,6}/\d{1,6}$")] = "0/1"
    """`i/n`: of n machines this is number i, from 0; `distill store merge` joins their stores."""
    shard_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = 64 << 20
    """Of one file of the store: the most that a kill costs."""
    ray: RayConfig | None = None
    """A table, even an empty one, spreads the capture over a Ray cluster ($RAY_ADDRESS)."""

    @field_validator("shard")
    @classmethod
    def _is_one_of_them(cls, shard: str) -> str:
        index, count = map(int, shard.split("/"))
        if index >= count:
            raise ValueError("must be i/n with i from 0 to n - 1")
        return f"{index}/{count}"  # as stores are compared, whoever wrote 01/16

    @property
    def part(self) -> tuple[int, int]:
        """`shard` as numbers: (i, n)."""
        index, count = map(int, self.shard.split("/"))
        return index, count

    def store_in(self, run: Path) -> Path:
        """Where the rows of a run go."""
        index, count = self.part
        whole = Path(self.store) if self.store else run / "store"
        return whole if count == 1 else whole / f"shard-{index}-of-{count}"


class CaptureJob(Table):
    """A job that captures."""

    data: CaptureData
    method: CaptureConfig
    teacher: CaptureTeacher = CaptureTeacher()
    student: StudentConfig | None = None
    """Only its tokenizer is read."""
    name: Annotated[str, Field(min_length=1, max_length=200)] = "distill"
    """For people; the job's id is made from it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the tail samples."""
    resources: ResourcesConfig = ResourcesConfig()
    priority: Priority = 0
    """In a server's queue: higher ones start first, equal ones as they came."""

    @property
    def max_steps(self) -> int:
        """Its steps are sequences, and not known before the data is read."""
        return 0
