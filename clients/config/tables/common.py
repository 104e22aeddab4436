"""Tables and types that several methods share, and the rules about keys without effect.

The string under each field is its description in docs/reference.md and `distill config schema`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from clients.data.object_urls import is_object_url, place_of
from protos.errors import InvalidInput

# The upper end keeps every count within the integers of messages and of SQLite.
Count = Annotated[int, Field(ge=1, lt=2**31)]

Name = Annotated[str, Field(min_length=1)]


def _check_address(value: Any) -> str | list[str]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(address, str) and address for address in listed):
        raise ValueError("must be HOST:PORT, or a list of HOST:PORT")
    return value  # type: ignore[no-any-return]


_TEXT = {"type": "string", "minLength": 1}


Address = Annotated[
    str | list[str],
    PlainValidator(_check_address),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]


def _check_recomputation(value: Any) -> bool | int | str:
    if type(value) is bool or (type(value) is int and value >= 2) or value == "selective":
        return value  # type: ignore[no-any-return]
    raise ValueError("must be true, false, a number of layers (at least 2), or 'selective'")


# One validator: a union has one message for each of its types.
Recomputation = Annotated[
    bool | int | str,
    PlainValidator(_check_recomputation),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2}, {"const": "selective"}]}
    ),
]


Tail = Literal["none", "published", "sampled", "bucket", "bucket+sampled", "bucket+draws"]
# Earlier versions had the default `bucket+sampled`. A resolved job contains every key, so this
# value counts as not set.
FORMER_TAIL = "bucket+sampled"
MAX_DRAWS = 256  # maximum that a teacher scores per row
TailDraws = Annotated[int, Field(ge=1, le=MAX_DRAWS)]


def check_tail(tail: str | None, divergence: str | None) -> str | None:
    """Return `tail`. Raises ValueError if `tail` is incompatible with `divergence`."""
    if tail == "bucket+draws" and divergence == "forward_kl":
        raise ValueError(
            "'bucket+draws' needs reverse_kl: with forward KL the teacher chooses the head;"
            " choose reverse_kl, or remove tail"
        )
    return tail


Beta = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """Base class of all tables of a job file. Frozen; unknown keys are refused.

    The constructor checks its arguments as the values of a job file are checked. It raises
    InvalidInput with a message that lists all problems of the table.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        # JSON has no infinity or NaN, and no key has a use for them.
        allow_inf_nan=False,
    )

    # Set by clients.config.problems, which knows the places of all tables in a job.
    explain_error: ClassVar[Callable[[ValidationError, type[BaseModel]], InvalidInput]]

    if not TYPE_CHECKING:  # a type checker derives the arguments from the keys

        def __init__(self, /, **values: Any) -> None:
            document = json.dumps(document_of(values))
            validator = self.__pydantic_validator__
            try:
                validator.validate_json(document, strict=True, self_instance=self)
            except ValidationError as error:
                raise self.explain_error(error, type(self)) from None

        # Only direct calls use this constructor, not the validation of an outer table.
        __init__.__pydantic_base_init__ = True

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys that are set to another value than their default."""
        fitted = self.fitted if isinstance(self, FittedTable) else frozenset[str]()
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            default = field.get_default(call_default_factory=True)
            if name in self.model_fields_set and (name in fitted or value != default):
                yield name, value


def document_of(value: Any, key: str = "") -> Any:
    """Return a value in the form that a job file can hold.

    A table becomes a dict of the keys that are set. A path or a date becomes text. Raises
    InvalidInput for a value that no job file can hold. The error names `key`, or a key below it.
    """
    match value:
        case Table():
            # `model_copy` refuses no unknown keys, which are in both too.
            keys = [name for name in value.__dict__ if name in value.model_fields_set]
            return document_of({name: value.__dict__[name] for name in keys}, key)
        case Mapping():
            prefix = f"{key}." if key else ""
            return {
                str(name): document_of(inner, f"{prefix}{name}") for name, inner in value.items()
            }
        case list() | tuple():
            return [document_of(inner, f"{key}.{n}") for n, inner in enumerate(value)]
        case str() | bool() | int() | float() | None:
            return value
        case os.PathLike() | date() | time():
            return str(value)
        case Integral():  # of numpy
            return int(value)
        case Real():
            return float(value)
    raise InvalidInput(
        "must be text, a number, true, false, a list or a table"
        f" (got a value of the class {type(value).__name__})",
        field=key,
    )


class FittedTable(Table):
    """A table with limits or columns that are computed if the job does not set them.

    `clients/preflight/limits.py` computes them from the models and the data. The table as JSON
    contains only the limits and columns that are set, so that a program that reads the JSON can
    compute the others.
    """

    fitted: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out_unset(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        unset = self.fitted - self.model_fields_set if info.mode_is_json() else frozenset[str]()
        return {key: value for key, value in values.items() if key not in unset}


_MAX_LORA_RANK = 512  # maximum of vLLM


class LoraConfig(Table):
    """Low-rank adapters on every linear layer except the head; other weights are frozen."""

    rank: Count = 32
    """Rank of each adapter. Even an empty table `student.lora` enables LoRA."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are scaled by alpha / rank. Default: twice the rank."""
    train_head: bool = False
    """Also train the full head, and the embeddings if they share weights with the head."""

    @property
    def rank_of_engines(self) -> int:
        """The LoRA rank for a rollout engine that loads adapters; 0 if it loads merged weights.

        Merged weights are necessary if the head is trained, because adapters do not contain it, or
        if the rank is above the maximum of vLLM.
        """
        return 0 if self.train_head or self.rank > _MAX_LORA_RANK else self.rank


class ModelSettings(Table):
    """Settings of the models of an evaluation."""

    chat_template: Name | None = None
    """A .jinja file to use instead of the model's template."""

    @field_validator("chat_template")
    @classmethod
    def _is_file(cls, name: str | None) -> str | None:
        if name is None or name.endswith(".jinja"):
            return name
        raise ValueError("must be the path of a .jinja file")


class EvaluatedModel(ModelSettings):
    """The model to evaluate. Its anchor is also evaluated, if its directory contains one."""

    model: Name
    """Hugging Face directory or hub id; or `@JOB/export`, the model of another job."""


class StudentConfig(Table):
    """The model to train."""

    model: Name
    """Hugging Face directory, its s3:// or gs:// URL, or hub id."""
    revision: str | None = None
    """Commit of the hub id."""
    chat_template: Name | None = None
    """A .jinja file to use instead of the model's template, or "teacher" for the template of the
    job's teacher. Exported.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on a GPU, else float32. Trained weights are float32."""
    gradient_checkpointing: Recomputation = False
    """Recompute activations: true, every n-th layer (n), or selective: all but matrix products."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """auto: flash if installed, on a GPU in bfloat16; else sdpa. Set a value if auto fails."""
    compile: bool = False
    """Compile the layers (torch.compile): faster updates on a GPU after minutes of compiling."""
    lora: LoraConfig | None = None
    """Train LoRA adapters; use about ten times the learning rate of full training."""

    @property
    def adapter_rank(self) -> int:
        """The LoRA rank for a rollout engine that loads adapters; 0 if it loads all weights."""
        return 0 if self.lora is None else self.lora.rank_of_engines

    @field_validator("chat_template")
    @classmethod
    def _is_file_or_teacher(cls, name: str | None) -> str | None:
        if name is None or name == "teacher" or name.endswith(".jinja"):
            return name
        raise ValueError("must be 'teacher' or the path of a .jinja file")

    @field_validator("attention")
    @classmethod
    def _fits_dtype(cls, attention: str, info: ValidationInfo) -> str:
        if attention == "flash" and info.data.get("dtype") == "float32":
            raise ValueError("needs dtype = 'bfloat16': flash attention has no float32")
        return attention


class TrainConfig(FittedTable):
    """The optimizer (AdamW), and the division of a step into micro-batches and processes."""

    fitted = frozenset({"prompts_per_step"})

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments in 8 bits, 2.1 instead of 8 bytes per weight; needs torchao."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decreasing to zero at `max_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly to its peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    adam_betas: Annotated[tuple[Beta, Beta], Field(examples=[[0.9, 0.95]])] = (0.9, 0.999)
    """AdamW's decay rates of the first and the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    max_skipped_updates: Annotated[int, Field(ge=0)] = 3
    """Maximum consecutive skipped updates (gradient not finite, no token); one more fails the job.
    """
    prompts_per_step: Count = 32
    """Prompts (or stored sequences) per step, over all processes. Unset: at most a tenth."""
    tokens_per_micro_batch: Count = 16384
    """Padded tokens per forward pass. It changes memory use, and results only by rounding."""
    processes: Count = 1
    """Number of processes, started by `accelerate launch`."""
    sharding: Literal["none", "fsdp2"] = "none"
    """none: each process stores all weights and optimizer state. fsdp2: each stores a shard."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory. Needs sharding = "fsdp2"."""
    tensor_parallel: Count = 1
    """Processes that share the matrices of each layer. Needs sharding = "fsdp2"."""
    context_parallel: Count = 1
    """Processes that share the tokens of each sequence. Needs sharding = "fsdp2"."""

    @field_validator("cpu_offload")
    @classmethod
    def _check_offload(cls, cpu_offload: bool, info: ValidationInfo) -> bool:
        settings = info.data.get("sharding", "fsdp2"), info.data.get("optimizer", "adamw")
        if cpu_offload and settings != ("fsdp2", "adamw"):
            raise ValueError("needs sharding = 'fsdp2' and optimizer = 'adamw'; set both")
        return cpu_offload

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is used: with several processes, or with CPU offload."""
        return self.sharding == "fsdp2" and (self.processes > 1 or self.cpu_offload)

    @field_validator("tensor_parallel")
    @classmethod
    def _divides_processes(cls, tensor_parallel: int, info: ValidationInfo) -> int:
        processes = info.data.get("processes", tensor_parallel)
        if processes % tensor_parallel:
            raise ValueError(f"must divide train.processes, which is {processes}")
        if tensor_parallel > 1 and info.data.get("sharding", "fsdp2") != "fsdp2":
            raise ValueError(
                "needs sharding = 'fsdp2', which shards the remaining layers of a process"
            )
        if tensor_parallel > 1 and info.data.get("optimizer") == "adamw_8bit":
            raise ValueError("cannot divide 8-bit optimizer moments; remove this key or optimizer")
        if tensor_parallel > 1 and info.data.get("cpu_offload"):
            raise ValueError("cannot be combined with cpu_offload; remove one of the two keys")
        return tensor_parallel

    @field_validator("context_parallel")
    @classmethod
    def _divides_tokens(cls, context_parallel: int, info: ValidationInfo) -> int:
        processes = info.data.get("processes", context_parallel)
        if processes % context_parallel:
            raise ValueError(f"must divide train.processes, which is {processes}")
        if context_parallel > 1 and info.data.get("sharding", "fsdp2") != "fsdp2":
            raise ValueError("needs sharding = 'fsdp2', which shards the weights")
        if context_parallel > 1 and info.data.get("tensor_parallel", 1) > 1:
            raise ValueError("cannot be combined with tensor_parallel; remove one of the two keys")
        return context_parallel


class EvalConfig(FittedTable):
    """Held-out evaluation: before the first step, every `every` steps, and at the end."""

    fitted = frozenset({"prompts"})

    every: Count = 50
    """Steps between evaluations."""
    prompts: Count = 128
    """Number of held-out prompts (or stored sequences). Unset: at most a tenth of the records."""
    metric: Literal["none", "exact_match"] = "none"
    """exact_match: compare final answers (the line after the last '####', or else the whole
    answer).
    """


class SampledEvalConfig(EvalConfig):
    """Held-out evaluation with one greedy answer, or several sampled answers, per prompt."""

    samples: Count = 1
    """Answers per held-out prompt: eval/reward and eval/accuracy are means over all (mean@n)."""
    temperature: Annotated[float, Field(ge=0), Field(validate_default=True)] = 0.0
    """Temperature of the held-out answers; 0 means greedy decoding."""

    @field_validator("temperature")
    @classmethod
    def _gives_different_answers(cls, temperature: float, info: ValidationInfo) -> float:
        if 0 < temperature < 1e-3:
            raise ValueError("must be 0 (greedy), or 0.001 or more")
        if temperature == 0 and info.data.get("samples", 1) > 1:
            raise ValueError("must be above 0 for samples > 1: greedy answers are all equal")
        return temperature


# If the newest checkpoint is damaged, the one before it is needed.
MIN_CHECKPOINTS = 2


class CheckpointConfig(Table):
    """Checkpoints. Each is written atomically, and verified when a job resumes from it."""

    every: Count = 50
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=MIN_CHECKPOINTS)] = 2
    """Newest checkpoints to keep, in addition to the best; at least 2, in case one is damaged."""
    copy_to: str | None = None
    """s3://BUCKET/PREFIX or gs://: copy checkpoints and export there, to resume elsewhere."""

    @field_validator("copy_to")
    @classmethod
    def _is_url(cls, copy_to: str | None) -> str | None:
        if copy_to is not None and not is_object_url(copy_to := place_of(copy_to)):
            raise ValueError("must be s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
        return copy_to


class ExportConfig(Table):
    """The exported model: a Hugging Face directory, written when the job has succeeded."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the exported weights. float16 and bfloat16 halve the size and round small updates.
    """


class TrackerConfig(Table):
    """An experiment tracker. The run has the job's name; a resumed job continues the run."""

    project: Name = "distill"
    """Project of the run. Even an empty table enables the tracker."""


class TrackConfig(Table):
    """Trackers that receive the metrics in addition to metrics.jsonl. A tracker error never stops a
    job.
    """

    tensorboard: bool = True
    """Write TensorBoard files into `tb/` in the run directory."""
    wandb: TrackerConfig | None = None
    """Weights & Biases. Needs an API key, unless WANDB_MODE=offline is set."""
    trackio: TrackerConfig | None = None
    """trackio: writes to this machine's disk; `trackio show` opens its dashboard."""


class ResourcesConfig(Table):
    """Resources that a server reserves for the running job; `distill run` ignores the table."""

    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    """GPUs reserved for this job. Default: one per process, plus the GPUs of `rollouts.gpus`."""
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads of all processes together; default: the server's `--threads-per-job`."""


Job = TypeVar("Job", bound=BaseModel)
# Whether the job uses the keys, the keys separated by spaces, and the hint of the error.
Rule = tuple[bool, str, str]


def refuse_unused(job: Job, rules: Iterable[Rule]) -> Job:
    """Return `job`. Raises ValidationError with an error for each key that has no effect.

    Only a value that differs from the default is refused. A resolved job contains every key, so a
    default in the file does not show that the user has set the key.
    """
    errors: list[InitErrorDetails] = []
    for is_used, keys, remedy in rules:
        for key in () if is_used else keys.split():
            path = tuple(key.split("."))
            value, default = _value_and_default(job, path)
            if value != default:
                problem = PydanticCustomError("unused_key", f"has no effect: {remedy}")
                errors.append(InitErrorDetails(type=problem, loc=path, input=value))
    if errors:
        raise ValidationError.from_exception_data(type(job).__name__, errors)
    return job


def refusal(job: BaseModel, key: str, problem: str) -> ValidationError:
    """Return an error at a key of `job`; dots separate the parts of the key."""
    path = tuple(key.split("."))
    value, _ = _value_and_default(job, path)
    refused_error = PydanticCustomError("refused_key", problem)
    details = InitErrorDetails(type=refused_error, loc=path, input=value)
    return ValidationError.from_exception_data(type(job).__name__, [details])


def _value_and_default(job: BaseModel, path: tuple[str, ...]) -> tuple[object, object]:
    """Return the value of a key and its default; (None, None) if its table is missing."""
    *tables, name = path
    table: BaseModel | None = job
    for inner in tables:
        table = getattr(table, inner, None)
    if table is None or name not in type(table).model_fields:
        return None, None
    field = type(table).model_fields[name]
    return getattr(table, name), field.get_default(call_default_factory=True)
