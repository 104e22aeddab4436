"""Tables and types that several methods share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

# The upper end keeps every count within the integers of messages and of SQLite.
Count = Annotated[int, Field(ge=1, lt=2**31)]


Name = Annotated[str, Field(min_length=1)]


def _address(value: Any) -> str | list[str]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise ValueError("must be HOST:PORT, or a list of them")
    return value  # type: ignore[no-any-return]


_TEXT = {"type": "string", "minLength": 1}


Address = Annotated[
    str | list[str],
    PlainValidator(_address),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]


class Table(BaseModel):
    model_config = ConfigDict(
        # An infinite learning rate is no learning rate, and JSON cannot say it.
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class LoraConfig(Table):
    """Low-rank adapters on every linear layer but the head; the weights under them are frozen."""

    rank: Count = 32
    """Of each adapter. A table `student.lora`, even an empty one, switches adapters on."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are scaled by alpha / rank. By default twice the rank."""
    train_head: bool = False
    """The head learns too, as a whole; with it the embeddings, where the two are one matrix."""


class StudentConfig(Table):
    """The model that learns."""

    model: Name
    """Hugging Face directory or hub id."""
    revision: str | None = None
    """Commit of a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; weights that learn and their optimizer are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA), with about ten times the learning rate of all weights."""


class TeacherLink(Table):
    """The service that scores what the student wrote."""

    address: Address = "localhost:50052"
    """HOST:PORT of a running `distill-teacher`; a list: several with the same weights."""
    logprob_format: Literal["f16", "f32"] = "f16"
    """Precision of the log-probs on the wire."""
    patience_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long a teacher that does not answer is waited for before the job fails."""
    prefetch_mib: Count = 256
    """Memory of rows that were sent ahead of the step that needs them."""


class TeacherConfig(TeacherLink):
    """A service whose rows are as long as the job says."""

    top_k: Count = 64
    """Head ids of a row: the student's likeliest tokens (reverse KL) or the teacher's (forward)."""


class DataConfig(Table):
    """The prompts."""

    path: Name
    """A .jsonl or .parquet file, or a hub data set id."""
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    answer_column: str = "answer"
    """Column with the reference answer; only evaluation reads it."""
    teacher_column: str = "teacher"
    """Column with the name of the teacher of the prompt; read where `teachers` names several."""
    template: str = "{prompt}"
    """The text given to the student; a model with a chat template gets it as the user's message."""
    eval_path: str | None = None
    """File with held-out prompts. By default `eval.prompts` of them are taken out of `path`."""


class TrainConfig(Table):
    """The optimizer (AdamW) and how a step is cut up."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak to zero at `max_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps from zero to the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    prompts_per_step: Count = 32
    """Prompts, or stored sequences, of one optimizer step, over all processes."""
    tokens_per_micro_batch: Count = 16384
    """Padded tokens of one forward pass; memory follows it, results do not."""
    processes: Count = 1
    """Processes of `accelerate launch`."""
    sharding: Literal["none", "fsdp2"] = "none"
    """Each process keeps all weights and their optimizer, or only its share of them (FSDP2)."""


class EvalConfig(Table):
    """Held-out evaluation, before the first step, every so often, and at the end."""

    every: Count = 50
    """Steps between evaluations."""
    prompts: Count = 128
    """Held-out prompts, or stored sequences."""
    metric: Literal["none", "exact_match"] = "none"
    """Task accuracy: the final answer (after a last '####', or all of it) is the reference's."""


class CheckpointConfig(Table):
    """Atomic, verified checkpoints."""

    every: Count = 50
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept besides the best one; two at least: a disk may break one of them."""


class TrackerConfig(Table):
    """A tracker of runs. Its run is named as the job, and a resumed job joins it."""

    project: Name = "distill"
    """Where the run is put. The table, even an empty one, switches the tracker on."""


class TrackConfig(Table):
    """Where metrics go besides metrics.jsonl. A tracker that fails never stops a run."""

    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb: TrackerConfig | None = None
    """Weights & Biases; its key from the environment, WANDB_MODE=offline needs none."""
    trackio: TrackerConfig | None = None
    """trackio, on this machine's disk: `trackio show` is its dashboard."""


class ResourcesConfig(Table):
    """What the job takes of a server's machine while it runs; `distill run` does not ask."""

    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    """GPUs that no other job of the server sees; by default one for each process."""
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads of all processes together; by default the server's `--threads-per-job`."""


Priority = Annotated[int, Field(ge=-100, le=100)]


class TrainingJob(Table):
    """What every kind of training has."""

    student: StudentConfig
    name: Annotated[str, Field(min_length=1, max_length=200)] = "distill"
    """For people; the job's id is made from it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of everything random: the same seed on the same machine gives the same weights."""
    max_steps: Count = 500
    """Optimizer steps."""
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    resources: ResourcesConfig = ResourcesConfig()
    priority: Priority = 0
    """In a server's queue: higher ones start first, equal ones as they came."""
