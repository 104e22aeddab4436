"""Decides whether a job fits into the memory of a GPU, and finds changes that make the job fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.config.kinds import AnyTraining
from clients.config.tables.common import LoraConfig
from clients.config.tables.rollouts import RolloutsConfig
from clients.data.models.shape import ModelShape, read_shape
from clients.plan.memory import (
    Load,
    host_bytes,
    peak_bytes,
    resident_bytes,
    sampling_bytes,
    stage_bytes,
)
from clients.preflight.disk import parameters_of
from clients.preflight.limits import longest_stored
from protos.errors import InvalidInput

GIB = 1 << 30
# Share of a GPU's memory for tensors. The rest: CUDA context, NCCL buffers, fragmentation.
USABLE = 0.9
_MAX_PROCESSES = 1024

# Changes of the job that save memory: name -> keys by table.
_Change = Mapping[str, Mapping[str, Any]]
_CHANGES: Mapping[str, _Change] = {
    'train.sharding = "fsdp2"': {"train": {"sharding": "fsdp2"}},
    "student.gradient_checkpointing = true": {"student": {"gradient_checkpointing": True}},
    'student.dtype = "bfloat16"': {"student": {"dtype": "bfloat16"}},
    'train.optimizer = "adamw_8bit"': {"train": {"optimizer": "adamw_8bit"}},
    "student.lora = {}": {"student": {"lora": LoraConfig()}},
}
_OFFLOAD: _Change = {"train": {"sharding": "fsdp2", "cpu_offload": True}}


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a process of a job on a GPU, in bytes.

    - load: the quantities that determine the memory.
    - parts: bytes by stage and part.
    - peak: bytes of the largest stage.
    - usable: bytes that the job's tensors may take.
    - micro_batch: maximum tokens per micro-batch that fit; 0 if not even one sequence fits.
    - changes: sentences about changes of the job that save memory; empty if the job fits.
    - longest: tokens of the longest sequence of the job's store; None without a readable store.
    """

    load: Load
    parts: Mapping[str, Mapping[str, int]]
    peak: int
    usable: int
    micro_batch: int
    changes: Sequence[str]
    longest: int | None

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable memory."""
        return self.peak <= self.usable


def plan_of(job: AnyTraining, shape: ModelShape, memory: float) -> MemoryPlan:
    """Return the memory plan of a job. `shape`: the sizes of its student. `memory`: GiB per GPU."""
    usable = round(USABLE * memory * GIB)
    longest = longest_stored(job)
    load = load_of(job, shape, longest, usable=usable)
    stage_parts = {
        name: resident_bytes(load) | parts for name, parts in stage_bytes(load).items() if parts
    }
    micro_batch = largest_micro_batch(job, shape, usable, longest)
    fits = peak_bytes(load) <= usable
    changes = [] if fits else changes_of(job, shape, usable, micro_batch, longest)
    return MemoryPlan(load, stage_parts, peak_bytes(load), usable, micro_batch, changes, longest)


def shape_of_student(job: AnyTraining) -> ModelShape:
    """Return the sizes of the job's student. Loads no weights.

    Raises InvalidInput (`student.model`) if the sizes are unknown, or if the headers of the weight
    files contradict config.json.
    """
    shape, directory = read_shape(job.student.model, job.student.revision)
    stored = parameters_of(directory)
    # Some tied models store their head beside the embeddings.
    if stored not in (0, shape.weights, shape.weights + shape.table_weights * shape.tied):
        raise InvalidInput(
            f"the files have {stored:,} weights, but config.json describes a model of"
            f" {shape.weights:,}",
            field="student.model",
            hint="distill plan does not support this architecture",
        )
    return shape


def load_of(
    job: AnyTraining, shape: ModelShape, longest: int | None = None, *, usable: int = 0
) -> Load:
    """Return the quantities of the job that determine the memory of one of its processes.

    Prompts and answers have the maximum length that the job allows. Sequences of a store have the
    length `longest`. If `longest` is None, because the store is not readable, they have the length
    of a whole micro-batch. `usable`: bytes of a GPU for tensors, of which an engine on the same GPU
    uses a part.
    """
    processes, token_budget = job.train.processes, job.train.tokens_per_micro_batch
    sequence_tokens, update_sequences, step_sequences = _sequence_counts(job, longest)
    sampled_tokens = sequence_tokens + (0 if job.samples else job.method.max_new_tokens)
    lora = job.student.lora
    load = Load(
        shape=shape,
        processes=processes,
        sharded=job.train.sharded,
        bf16=job.student.dtype in ("bfloat16", "auto"),
        checkpointing=job.student.gradient_checkpointing,
        tokens=sequence_tokens * min(max(1, token_budget // sequence_tokens), update_sequences),
        line=sequence_tokens,
        sampled=min(max(1, 4 * token_budget // sampled_tokens), step_sequences),
        sampled_line=sampled_tokens,
        # Each turn is prefilled with all earlier turns.
        sampled_prompt=sampled_tokens - (0 if job.search else job.method.max_new_tokens),
        lora=0 if lora is None else lora.rank,
        train_head=lora is not None and lora.train_head,
        anchor=job.has_anchor,
        narrow_moments=job.train.optimizer == "adamw_8bit",
        critic_tokens=job.answers_per_step * job.method.max_new_tokens if job.has_critic else 0,
        tensor_parallel=job.train.tensor_parallel,
        context_parallel=job.train.context_parallel,
        cpu_offload=job.train.cpu_offload,
        gpu_bytes=round(usable / USABLE) or Load.gpu_bytes,
    )
    rollouts = job.rollout_engine
    if rollouts is None:
        return load
    engine_sleeps = rollouts.engine == "vllm" and not rollouts.lag
    engine = _shared_engine(rollouts, load, usable)
    return replace(load, sampled=0, engine=engine, engine_sleeps=engine_sleeps)


def _shared_engine(rollouts: RolloutsConfig, load: Load, usable: int) -> int:
    """Return the bytes of an engine on the trainer's GPU; 0 without such an engine.

    `load`: the load of a trainer that samples without an engine.
    """
    if rollouts.gpus or not rollouts.replicas:
        return 0
    if rollouts.engine == "vllm":
        return round(rollouts.memory_share * usable / USABLE)
    # The engine "hf" has its own copy of all weights.
    unsharded_load = replace(
        load, processes=1, sharded=False, tensor_parallel=1, context_parallel=1
    )
    return resident_bytes(unsharded_load)["weights"] + sum(sampling_bytes(unsharded_load).values())


def _sequence_counts(job: AnyTraining, longest: int | None) -> tuple[int, int, int]:
    """Return the tokens of the longest sequence, and two numbers of sequences for one process.

    The first number is that of the sequences in an update. The second is the maximum number of
    sequences sampled in a step or in an evaluation.
    """
    micro_batch = job.train.tokens_per_micro_batch
    sequence_tokens = longest or (micro_batch if job.stores else job.longest_sequence)
    samples_held_out = job.samples or job.is_evaluated
    held_out = math.ceil(job.eval.prompts / job.processes) if samples_held_out else 0
    return sequence_tokens, job.sequences_per_update, max(job.answers_per_step, held_out)


def largest_micro_batch(
    job: AnyTraining, shape: ModelShape, usable: int, longest: int | None = None
) -> int:
    """Return the maximum tokens per micro-batch that fit; 0 if not even one sequence fits.

    The result is at most the tokens of the process's sequences in a step, because a micro-batch
    cannot be larger.
    """
    sequence_tokens, update_sequences, step_sequences = _sequence_counts(job, longest)
    # Binary search: memory grows with the number of sequences.
    fitting_count, excess_count = 0, max(update_sequences, step_sequences) + 1
    while excess_count - fitting_count > 1:
        middle_count = (fitting_count + excess_count) // 2
        tried_job = with_changes(
            job, {"train": {"tokens_per_micro_batch": middle_count * sequence_tokens}}
        )
        if peak_bytes(load_of(tried_job, shape, longest, usable=usable)) <= usable:
            fitting_count = middle_count
        else:
            excess_count = middle_count
    return fitting_count * sequence_tokens


def changes_of(
    job: AnyTraining, shape: ModelShape, usable: int, micro_batch: int, longest: int | None = None
) -> list[str]:
    """Return one sentence for each change of the job that saves memory.

    A sentence says whether the job fits with this change. If no single change is enough, one more
    sentence is about all changes together.
    """
    sentences = []
    changed_job: AnyTraining = job
    for name, change in {
        **_CHANGES,
        **_shared_tokens(job, shape, usable, micro_batch, longest),
    }.items():
        if not _is_change(job, change):
            continue
        changed_job = with_changes(changed_job, change)
        needed_bytes = peak_bytes(load_of(with_changes(job, change), shape, longest, usable=usable))
        verdict = "fits" if needed_bytes <= usable else "does not fit alone"
        sentences.append(f"{name}: {gib(needed_bytes)} GiB, {verdict}")
    if micro_batch:
        sentences.append(f"train.tokens_per_micro_batch = {micro_batch}: fits")
    if (processes := _count_enough_processes(job, shape, usable, longest)) is not None:
        sentences.append(f'{processes} GPUs with train.sharding = "fsdp2": fits')
    if not any(sentence.endswith(" fits") or sentence.endswith(": fits") for sentence in sentences):
        smallest = largest_micro_batch(changed_job, shape, usable, longest)
        needed_bytes = peak_bytes(load_of(changed_job, shape, longest, usable=usable))
        if needed_bytes <= usable:
            sentences.append(f"all of these together: {gib(needed_bytes)} GiB, fits")
        elif smallest:
            sentences.append(
                f"all of these together, and train.tokens_per_micro_batch = {smallest}: fits"
            )
        else:
            sentences.append("all of these together: do not fit; the student is too large")
    return sentences + _offload_changes(job, shape, usable, longest)


def _offload_changes(
    job: AnyTraining, shape: ModelShape, usable: int, longest: int | None
) -> list[str]:
    """Return a sentence about CPU offload if the job supports it and fits with it, else []."""
    train = job.train
    if train.cpu_offload or train.tensor_parallel > 1 or train.optimizer != "adamw":
        return []
    load = load_of(with_changes(job, _OFFLOAD), shape, longest, usable=usable)
    if peak_bytes(load) > usable:
        return []
    requirement = (
        f"{gib(peak_bytes(load))} GiB, and {gib(host_bytes(load))} GiB of host memory per GPU"
    )
    return [f'train = {{ sharding = "fsdp2", cpu_offload = true }}: {requirement}, fits']


def _shared_tokens(
    job: AnyTraining, shape: ModelShape, usable: int, micro_batch: int, longest: int | None
) -> Mapping[str, _Change]:
    """Return the key `train.context_parallel` as a change of the job, with its name.

    The value is the smallest group size with which the job fits, or else the largest possible size.
    The result is {} if a micro-batch of one sequence fits without this change, or if the job does
    not support such groups.
    """
    if micro_batch or job.train.tensor_parallel > 1 or job.student.compile:
        return {}
    changes: Mapping[str, _Change] = {}
    for size in range(job.train.context_parallel + 1, job.train.processes + 1):
        if job.train.processes % size or shape.heads % size:
            continue
        keys = {"sharding": "fsdp2", "context_parallel": size}
        name = f'train = {{ sharding = "fsdp2", context_parallel = {size} }}'
        if job.train.sharding == "fsdp2":
            name = f"train.context_parallel = {size}"
        changes = {name: {"train": keys}}
        if (
            peak_bytes(load_of(with_changes(job, changes[name]), shape, longest, usable=usable))
            <= usable
        ):
            return changes
    return changes


def _count_enough_processes(
    job: AnyTraining, shape: ModelShape, usable: int, longest: int | None
) -> int | None:
    """Return the smallest tried number of processes with which the job fits under FSDP2.

    The numbers that are tried are 2, 4, 8 ... times the number of the job. The result is None if
    the job fits with none of them.
    """
    count = 2 * job.train.processes
    while count <= min(_MAX_PROCESSES, job.max_processes):
        tried_job = with_changes(job, {"train": {"processes": count, "sharding": "fsdp2"}})
        if peak_bytes(load_of(tried_job, shape, longest, usable=usable)) <= usable:
            return count
        count *= 2
    return None


def _is_change(job: AnyTraining, change: _Change) -> bool:
    if "sharding" in change.get("train", {}) and job.train.processes == 1:
        return False  # a single process shards nothing
    has_8bit_moments = "optimizer" in change.get("train", {})
    if job.train.tensor_parallel > 1 and (has_8bit_moments or "lora" in change.get("student", {})):
        return False  # groups divide neither adapters nor moments in 8 bits
    if job.train.cpu_offload and has_8bit_moments:
        return False  # a CPU updates moments in float32
    for table, values in change.items():
        for key, value in values.items():
            current_value = getattr(getattr(job, table), key)
            if current_value not in (value, "auto") and not isinstance(current_value, LoraConfig):
                return True
    return False


def with_changes(job: AnyTraining, change: _Change) -> AnyTraining:
    """Return a copy of the job with new values of keys. The values are not validated.

    `change`: the new values by table and key.
    """
    tables = {
        table: getattr(job, table).model_copy(update=dict(values))
        for table, values in change.items()
    }
    return job.model_copy(update=tables)


def gib(count: int) -> str:
    """Return a number of bytes as text in GiB, with two decimals."""
    return f"{count / GIB:.2f}"
