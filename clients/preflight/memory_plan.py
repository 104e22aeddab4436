"""Whether a job fits into the memory of a GPU, and which change of the job makes it fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.config.kinds import AnyTraining, SamplingJob
from clients.config.offline import OfflineJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.common import LoraConfig
from clients.config.tables.rollouts import RolloutsConfig
from clients.data.model_shape import ModelShape, read_shape
from clients.data.object_urls import is_object_url
from clients.preflight.disk import parameters_of
from clients.preflight.memory import Load, held, on_host, peak, sampling, stages
from clients.store.dataset import LogitDataset
from protos.errors import DistillError, InvalidInput

GIB = 1 << 30
# Share of a GPU's memory for tensors. The rest: CUDA context, NCCL buffers, fragmentation.
USABLE = 0.9
_MOST_PROCESSES = 1024

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
class Plan:
    """The memory of a process of a job on a GPU, in bytes.

    parts: bytes of each stage by part. peak: of the largest stage. usable: what tensors may use.
    micro_batch: most tokens per micro-batch that fit; 0: not even one sequence does. changes:
    sentences on what makes the job fit; empty if it fits. longest: tokens of the longest sequence
    of the job's store; None if it has no store, or one that cannot be read.
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


def plan_of(job: AnyTraining, shape: ModelShape, memory: float) -> Plan:
    """Return the plan of a job. `shape`: of its student. `memory`: of a GPU, in GiB."""
    usable = round(USABLE * memory * GIB)
    longest = longest_stored(job) if isinstance(job, OfflineJob) else None
    load = load_of(job, shape, longest, usable=usable)
    found = {name: held(load) | parts for name, parts in stages(load).items() if parts}
    most = largest_micro_batch(job, shape, usable, longest)
    fits = peak(load) <= usable
    changes = [] if fits else changes_of(job, shape, usable, most, longest)
    return Plan(load, found, peak(load), usable, most, changes, longest)


def shape_of_student(job: AnyTraining) -> ModelShape:
    """Return the sizes of the job's student; loads no weights.

    Raises InvalidInput (`student.model`) if they are not known, or if the headers of the weights
    have another number of weights than config.json states.
    """
    shape, directory = read_shape(job.student.model, job.student.revision)
    stored = parameters_of(directory)
    # Some tied models store their head beside the embeddings.
    if stored not in (0, shape.weights, shape.weights + shape.table_weights * shape.tied):
        raise InvalidInput(
            f"the files have {stored:,} weights, but a model of this config.json {shape.weights:,}",
            field="student.model",
            hint="this architecture is not known to the plan",
        )
    return shape


def load_of(
    job: AnyTraining,
    shape: ModelShape,
    longest: int | None = None,
    *,
    cuda: bool = True,
    usable: int = 0,
) -> Load:
    """Return what decides the memory of a process of the job.

    Prompts and answers are taken as long as the job allows. Sequences of a store are as long as its
    `longest` one; those of a store that is not there yet (None), as a micro-batch. `usable`: memory
    of a GPU for tensors, of which an engine that shares it takes a part.
    """
    processes, most = job.train.processes, job.train.tokens_per_micro_batch
    line, of_update, of_step = _sequences(job, longest)
    stored = isinstance(job, OfflineJob | SFTJob)
    answer = line + job.method.max_new_tokens * stored
    lora, rl = job.student.lora, isinstance(job, RLJob)
    critic = isinstance(job, RLJob) and job.method.advantages == "gae"
    # Each turn reads everything before it again.
    several_turns = isinstance(job, RLJob) and job.environment is not None
    samples = not isinstance(job, SamplingJob) or job.rollouts.in_trainer
    written = math.ceil(job.train.prompts_per_step / processes)
    if isinstance(job, RLJob):
        written *= job.method.rollouts_per_prompt
    load = Load(
        shape=shape,
        processes=processes,
        sharded=job.train.sharded,
        bf16=job.student.dtype == "bfloat16" or (cuda and job.student.dtype == "auto"),
        checkpointing=job.student.gradient_checkpointing,
        tokens=line * min(max(1, most // line), of_update),
        line=line,
        sampled=min(max(1, 4 * most // answer), of_step),
        sampled_line=answer,
        sampled_prompt=answer if several_turns else answer - job.method.max_new_tokens,
        lora=0 if lora is None else lora.rank,
        train_head=lora is not None and lora.train_head,
        anchor=isinstance(job, RLJob) and job.method.beta > 0,
        narrow_moments=job.train.optimizer == "adamw_8bit",
        critic_tokens=written * job.method.max_new_tokens if rl and critic else 0,
        cuda=cuda,
        tensor_parallel=job.train.tensor_parallel,
        context_parallel=job.train.context_parallel,
        cpu_offload=job.train.cpu_offload,
    )
    if samples:
        return load
    assert isinstance(job, SamplingJob)
    sleeps = job.rollouts.engine == "vllm" and not job.rollouts.lag
    engine = _shared_engine(job.rollouts, load, usable)
    return replace(load, sampled=0, engine=engine, engine_sleeps=sleeps)


def _shared_engine(rollouts: RolloutsConfig, load: Load, usable: int) -> int:
    """Return the bytes of an engine on the trainer's GPU; 0 if there is none.

    `load`: that of the trainer if it sampled itself.
    """
    if rollouts.gpus or not rollouts.replicas:
        return 0
    if rollouts.engine == "vllm":
        return round(rollouts.memory_share * usable / USABLE)
    # transformers, with all weights of its own.
    alone = replace(load, processes=1, sharded=False, tensor_parallel=1, context_parallel=1)
    return held(alone)["weights"] + sum(sampling(alone).values())


def _sequences(job: AnyTraining, longest: int | None) -> tuple[int, int, int]:
    """Return tokens of the longest sequence, and sequences of a process.

    The sequences are those of an update, and the most that are sampled in a step or an evaluation.
    """
    processes, train = job.train.processes, job.train
    examined = math.ceil(job.eval.prompts / processes)
    if isinstance(job, OfflineJob):
        own = math.ceil(train.prompts_per_step / processes)
        mixed = math.ceil(job.method.on_policy_fraction * train.prompts_per_step / processes)
        line = longest or train.tokens_per_micro_batch
        return line, own, max(mixed, examined * (job.eval.metric != "none"))
    if isinstance(job, SFTJob):
        own = math.ceil(train.prompts_per_step / processes)
        return job.method.max_tokens, own, examined * (job.eval.metric != "none")
    line = job.method.max_prompt_tokens + job.method.max_new_tokens
    size = job.method.rollouts_per_prompt
    if not isinstance(job, RLJob):
        own = math.ceil(train.prompts_per_step * size / processes)
        return line, own, max(own, examined)
    own = size * math.ceil(train.prompts_per_step / job.method.updates_per_step / processes)
    return line, own, max(size * math.ceil(train.prompts_per_step / processes), examined)


def longest_stored(job: OfflineJob) -> int | None:
    """Return the tokens of the longest sequence of the job's store; None if it cannot be read.

    A store at a URL is not read: only the job's program copies it.
    """
    if is_object_url(job.data.path):
        return None
    try:
        return int(LogitDataset(job.data.path).lengths.max())
    except (DistillError, OSError):
        return None


def largest_micro_batch(
    job: AnyTraining, shape: ModelShape, usable: int, longest: int | None = None
) -> int:
    """Return the most tokens per micro-batch that fit; 0 if not even one sequence does.

    More than a process's sequences of a step change nothing, so they are not tried.
    """
    line, of_update, of_step = _sequences(job, longest)
    # `fits` is true up to some number of lines, and false from there on.
    most, too_many = 0, max(of_update, of_step) + 1
    while too_many - most > 1:
        middle = (most + too_many) // 2
        tried = changed(job, {"train": {"tokens_per_micro_batch": middle * line}})
        if peak(load_of(tried, shape, longest, usable=usable)) <= usable:
            most = middle
        else:
            too_many = middle
    return most * line


def changes_of(
    job: AnyTraining, shape: ModelShape, usable: int, most: int, longest: int | None = None
) -> list[str]:
    """Return a sentence on each change of the job that alone makes it fit, or on all together."""
    found = []
    together: AnyTraining = job
    for name, change in {**_CHANGES, **_shared_tokens(job, shape, usable, most, longest)}.items():
        if not _is_change(job, change):
            continue
        together = changed(together, change)
        needed = peak(load_of(changed(job, change), shape, longest, usable=usable))
        verdict = "fits" if needed <= usable else "does not fit alone"
        found.append(f"{name}: {gib(needed)} GiB, {verdict}")
    if most:
        found.append(f"train.tokens_per_micro_batch = {most}: fits")
    if (processes := _enough(job, shape, usable, longest)) is not None:
        found.append(f'{processes} GPUs with train.sharding = "fsdp2": fits')
    if not any(one.endswith(" fits") or one.endswith(": fits") for one in found):
        smallest = largest_micro_batch(together, shape, usable, longest)
        needed = peak(load_of(together, shape, longest, usable=usable))
        if needed <= usable:
            found.append(f"all of these together: {gib(needed)} GiB, fits")
        elif smallest:
            found.append(
                f"all of these together, and train.tokens_per_micro_batch = {smallest}: fits"
            )
        else:
            found.append("all of these together: do not fit; the student is too large")
    return found + _offloaded(job, shape, usable, longest)


def _offloaded(job: AnyTraining, shape: ModelShape, usable: int, longest: int | None) -> list[str]:
    """Return a sentence on weights in host memory, if the job can have them there and then fits."""
    train = job.train
    if train.cpu_offload or train.tensor_parallel > 1 or train.optimizer != "adamw":
        return []
    load = load_of(changed(job, _OFFLOAD), shape, longest, usable=usable)
    if peak(load) > usable:
        return []
    needed = f"{gib(peak(load))} GiB, and {gib(on_host(load))} GiB of host memory per GPU"
    return [f'train = {{ sharding = "fsdp2", cpu_offload = true }}: {needed}, fits']


def _shared_tokens(
    job: AnyTraining, shape: ModelShape, usable: int, most: int, longest: int | None
) -> Mapping[str, _Change]:
    """Return context parallelism as a change: in the smallest groups that fit, or in the largest.

    {} if a micro-batch of one sequence fits without, or if the job cannot have groups.
    """
    if most or job.train.tensor_parallel > 1 or job.student.compile:
        return {}
    found: Mapping[str, _Change] = {}
    for size in range(job.train.context_parallel + 1, job.train.processes + 1):
        if job.train.processes % size or shape.heads % size:
            continue
        keys = {"sharding": "fsdp2", "context_parallel": size}
        name = f'train = {{ sharding = "fsdp2", context_parallel = {size} }}'
        if job.train.sharding == "fsdp2":
            name = f"train.context_parallel = {size}"
        found = {name: {"train": keys}}
        if peak(load_of(changed(job, found[name]), shape, longest, usable=usable)) <= usable:
            return found
    return found


def _enough(job: AnyTraining, shape: ModelShape, usable: int, longest: int | None) -> int | None:
    """Return the fewest processes, doubled from the job's, with which FSDP2 fits; None: none."""
    count = 2 * job.train.processes
    while count <= _most_processes(job):
        tried = changed(job, {"train": {"processes": count, "sharding": "fsdp2"}})
        if peak(load_of(tried, shape, longest, usable=usable)) <= usable:
            return count
        count *= 2
    return None


def _most_processes(job: AnyTraining) -> int:
    """Return the most processes that each have a sequence of every update and evaluation."""
    most = min(_MOST_PROCESSES, job.sequences_per_step, job.eval.prompts)
    if isinstance(job, RLJob):
        most = min(most, job.train.prompts_per_step // job.method.updates_per_step)
    return most


def _is_change(job: AnyTraining, change: _Change) -> bool:
    if "sharding" in change.get("train", {}) and job.train.processes == 1:
        return False  # a single process shards nothing
    narrow = "optimizer" in change.get("train", {})
    if job.train.tensor_parallel > 1 and (narrow or "lora" in change.get("student", {})):
        return False  # groups divide neither adapters nor moments in 8 bits
    if job.train.cpu_offload and narrow:
        return False  # a CPU updates moments in float32
    for table, values in change.items():
        for key, value in values.items():
            now = getattr(getattr(job, table), key)
            if now not in (value, "auto") and not isinstance(now, LoraConfig):
                return True
    return False


def changed(job: AnyTraining, change: _Change) -> AnyTraining:
    """Return the job with other values of keys, given by table. They are not checked."""
    tables = {
        table: getattr(job, table).model_copy(update=dict(values))
        for table, values in change.items()
    }
    return job.model_copy(update=tables)


def gib(count: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / GIB:.2f}"
