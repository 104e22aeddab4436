"""The table `teacher` of a job: a running teacher service, or the model of a teacher to start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from clients.config.tables.common import Address, Count, Name, Rule, Table, TailDraws
from clients.config.tables.data import checked_arguments


class TeacherLink(Table):
    """The teacher service that scores the student's rollouts."""

    address: Address = "localhost:50052"
    """HOST:PORT of a running `distill-teacher`, or a list of services with the same weights."""
    adapter: Name | None = None
    """LoRA adapter of the teacher at `address`, by its name in `distill-teacher --adapter`."""
    model: Name | None = None
    """Instead of `address`: directory or hub id of a model. A teacher is started for the job."""
    engine: Literal["hf", "vllm", "fake"] = "hf"
    """Engine that runs `model`, as `distill-teacher --engine`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights of `model`. auto: the dtype of the saved weights."""
    device: str = "auto"
    """Device of `model`: auto, cpu, cuda, or a device such as cuda:1."""
    max_batch_tokens: Count = 16384
    """Padded tokens per forward pass of `model`."""
    batch_invariant: bool = False
    """Make rows of `model` independent of other sequences, as `--batch-invariant` (hf)."""
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    """GPUs of `model`, which share each layer (vllm). Default: 1, or 0 with device = 'cpu'."""
    logprob_format: Literal["f16", "f32"] = "f16"
    """Precision of the log-probs that the teacher sends: float16 or float32."""
    patience_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without an answer of the teacher. Then the attempt ends; a server queues the job."""
    prefetch_mib: Count = 256
    """MiB of memory for rows that arrive before their step."""

    @field_validator("device")
    @classmethod
    def _is_the_engines(cls, device: str, info: ValidationInfo) -> str:
        if device != "auto" and info.data.get("engine") == "vllm":
            raise ValueError("vllm uses the visible GPUs; remove the key")
        return device

    @field_validator("batch_invariant")
    @classmethod
    def _is_of_hf(cls, batch_invariant: bool, info: ValidationInfo) -> bool:
        if batch_invariant and info.data.get("engine") != "hf":
            raise ValueError("needs teacher.engine = 'hf'; set teacher.engine, or remove the key")
        return batch_invariant

    @field_validator("gpus")
    @classmethod
    def _can_be_used(cls, gpus: int | None, info: ValidationInfo) -> int | None:
        if gpus and info.data.get("device") == "cpu":
            raise ValueError("device = 'cpu' uses no GPU; remove one of the two keys")
        if gpus and gpus > 1 and info.data.get("engine") != "vllm":
            raise ValueError(
                "more than one GPU needs teacher.engine = 'vllm'; set teacher.engine, or remove"
                " the key"
            )
        return gpus

    @property
    def gpus_of_model(self) -> int:
        """Number of GPUs that `model` uses on a machine with GPUs: the key `gpus`, or its default.

        The default is 0 for a model on the CPU and for the engine `fake`, otherwise 1.
        """
        if self.gpus is not None:
            return self.gpus
        return 0 if self.device == "cpu" or self.engine == "fake" else 1


# The keys that determine how the teacher of a job is started.
STARTED_KEYS = ("model", "engine", "dtype", "device", "max_batch_tokens", "batch_invariant", "gpus")


def started_rules(teacher: TeacherLink | None) -> list[Rule]:
    """Return the rules, for `refuse_unused`, of keys that depend on how the job gets its teacher.

    Some keys have an effect only if a teacher is started for the job, others only if a running
    teacher is used.
    """
    is_started = teacher is not None and teacher.model is not None
    return [
        (
            not is_started,
            "teacher.address",
            "the server starts teacher.model; remove one of the two keys",
        ),
        (
            not is_started,
            "teacher.adapter",
            "a teacher started for the job has no adapters; set teacher.address to a teacher"
            " with this adapter",
        ),
        (
            is_started,
            " ".join(f"teacher.{option}" for option in STARTED_KEYS[1:]),
            "the teacher at teacher.address has its own value; remove the key, or set"
            " teacher.model",
        ),
    ]


@dataclass(frozen=True)
class RowRequest:
    """The rows that a job requests from its teachers for sequences that the student samples.

    - top_k: head ids per row.
    - top_k_key: the key of the job that sets `top_k`.
    - temperature: the temperature of the rows.
    - sequence_tokens: maximum number of tokens of a prompt with its answer.
    - answer_tokens: maximum number of tokens of an answer.
    - of_student: whether the student chooses the head ids and sends them to the teacher.
    - draws: ids per row that the student draws from its tail and sends to the teacher.
    - tail: a value of `method.tail` that needs no draws, for error messages.
    - teacher_head: text for error messages: how to select a head that the teacher chooses.
    - tail_samples: ids per row that the teacher samples from its tail.
    """

    top_k: int
    top_k_key: str
    temperature: float
    sequence_tokens: int
    answer_tokens: int
    of_student: bool
    draws: int
    tail: str
    teacher_head: str
    tail_samples: int = 0


class OtherTokens(Table):
    """Keys for a teacher whose tokenizer or chat template may differ from the student's."""

    tokenizer: Name = "same"
    """same: only the student's tokenizer. auto: any. A directory or hub id: its tokenizer."""
    roles: dict[Name, Name] = {}  # noqa: RUF012 (pydantic copies it)
    """Counterparts of special tokens, student = teacher, if not detected; see docs/pairs.md."""
    template_arguments: dict[Name, Any] | None = None
    """Arguments of the teacher's chat template. Default: the data.template_arguments that it uses.
    """

    @field_validator("template_arguments")
    @classmethod
    def _are_of_the_template(cls, arguments: dict[str, Any] | None) -> dict[str, Any] | None:
        return arguments and checked_arguments(arguments)


def other_tokens_rules(teacher: OtherTokens, *, chat_template: bool) -> list[Rule]:
    """Return the rules, for `refuse_unused`, of the keys of `OtherTokens`.

    `chat_template`: the value of the key `data.chat_template`.
    """
    return [
        (
            teacher.tokenizer != "same",
            "teacher.roles",
            "only a teacher with another tokenizer uses this key; set teacher.tokenizer",
        ),
        (
            chat_template,
            "teacher.template_arguments",
            "data.chat_template = false switches the chat template off; remove one of the two keys",
        ),
    ]


class TeacherConfig(TeacherLink):
    """A teacher service, and the number of head ids of its rows."""

    top_k: Count | None = None
    """Head ids per row: top-k of the student (reverse KL) or of the teacher. Default: 16 with draws
    from the tail, otherwise 64.
    """
    tail_draws: TailDraws = 48
    """Ids per row drawn from the tail, by the student (reverse KL) or the teacher (forward KL)."""
    context: str | None = None
    """Text before the prompt that only the teacher reads; may contain {columns} of the data."""
