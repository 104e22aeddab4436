"""The seconds of a step, computed from the sizes of the models and the figures of a machine.

A step has four parts: the rollouts, the teacher's rows, the trainer (anchor, p_old, updates), and
the push of new weights to the engines. A forward or backward pass takes the time of its matrix
products plus the time of its memory traffic. A decoding step takes the longer of two times (its
matrix products; the reads of weights and cache), plus the time to launch the step and to create its
outputs (head ids, draws). The trainer's GPUs exchange data while they compute, so the trainer's
part takes the longer of these two times. Answers have the maximum length that the job allows, so
the seconds are an upper bound for a job whose answers end early. `benchmarks/models/step_time.py`
compares the formulas with updates and sampling on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clients.config.kinds import AnyTraining
from clients.data.models.shape import ModelShape, read_shape
from clients.plan.machines import GPUS_OF_MACHINE, GpuFigures
from clients.plan.memory import BFLOAT16, FLOAT32, Load, peak_bytes, saved_per_token
from clients.plan.memory_plan import GIB, USABLE, load_of, with_changes
from protos.errors import InvalidInput, Unavailable

# Bytes per entry of a chunk of logits of the fused operator: written, read twice, and its gradient
# written once and read by two products.
_LOGIT_BYTES = 3 * FLOAT32 + 3 * BFLOAT16
# Bytes per trained weight of clipping and AdamW: norm 4, scaling 8, reading w, m, v and the
# gradient 16, writing w, m and v 12, clearing 4.
_OPTIMIZER_BYTES = 44
# Saved activations are written and read in the forward pass, read in the backward pass, and have
# gradients of the same size that are written and read.
_ACTIVATION_PASSES = 5


@dataclass(frozen=True)
class StepTime:
    """The seconds of the parts of a step, and of the whole step.

    - parts: "rollouts", "teacher", "trainer", "push"; only those that the job has.
    - overlaps: whether rollouts run while the trainer learns (rollouts.lag > 0).
    - without_teacher: whether the job has a teacher whose size is not known, so that its seconds
      are not in `parts`.
    """

    parts: Mapping[str, float]
    overlaps: bool
    without_teacher: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step. The teacher scores while the trainer learns from earlier rows."""
        trainer = max(self.parts["trainer"], self.parts.get("teacher", 0.0))
        trainer += self.parts.get("push", 0.0)
        rollouts = self.parts.get("rollouts", 0.0)
        return max(rollouts, trainer) if self.overlaps else rollouts + trainer

    @property
    def bottleneck(self) -> str:
        """The part with the most seconds."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True)
class Split:
    """GPUs of the trainer, of the rollout engines and of the teacher."""

    trainer: int
    engines: int
    teacher: int


def step_time(job: AnyTraining, shape: ModelShape, load: Load, machine: GpuFigures) -> StepTime:
    """Return the seconds of a step of the job. `load`: of `load_of`. Loads no weights."""
    step_tokens = job.sequences_per_step * load.line
    rows = job.sequences_per_step * (job.method.max_new_tokens if job.samples else load.line)
    parts = {"trainer": _trainer_seconds(job, load, machine, step_tokens, rows)}
    rollouts = job.rollout_engine
    if job.samples:
        engines = load.processes if rollouts is None else max(1, rollouts.replicas)
        group = 1 if rollouts is None else rollouts.tensor_parallel_size
        answers = math.ceil(job.sequences_per_step / engines)
        parts["rollouts"] = sampling_seconds(
            shape, machine, answers, load.line, job.method.max_new_tokens, load.itemsize, group
        )
        if rollouts is not None:
            # float32 weights to bfloat16 files in host memory, and from there to each engine.
            parts["push"] = 2 * BFLOAT16 * shape.weights / machine.host
    if (teacher := _teacher_shape(job)) is not None and job.started_teacher is not None:
        gpus = max(1, job.started_teacher.gpus_of_model)
        parts["teacher"] = (
            forward_seconds(teacher, machine, step_tokens, load.line, rows, bf16=True) / gpus
        )
    has_teacher = bool(job.teacher_addresses) or job.started_teacher is not None
    return StepTime(
        parts,
        overlaps=rollouts is not None and rollouts.lag > 0,
        without_teacher=has_teacher and "teacher" not in parts,
    )


def _teacher_shape(job: AnyTraining) -> ModelShape | None:
    """Return the sizes of the job's started teacher; None if they are not known."""
    if job.started_teacher is None:
        return None
    try:
        return read_shape(str(job.started_teacher.model), None)[0]
    except (InvalidInput, Unavailable):
        return None


def _trainer_seconds(
    job: AnyTraining, load: Load, machine: GpuFigures, tokens: int, rows: int
) -> float:
    """Return the seconds of anchor rows, p_old and all updates of a step."""
    updates = getattr(job.method, "total_updates", 1)
    epochs = getattr(job.method, "epochs_per_step", 1)
    share = load.tensor_parallel / load.processes
    own_tokens, own_rows = tokens * share, rows * share
    micro_batches = max(1, math.ceil(own_tokens * epochs / load.tokens))
    passes = job.has_anchor + (updates > 1)
    scoring = passes * forward_seconds(
        load.part, machine, own_tokens, load.line, own_rows, bf16=load.bf16
    )
    learning = update_seconds(
        load, machine, own_tokens * epochs, own_rows * epochs, micro_batches, updates
    )
    gathers = micro_batches * (2 + passes) if load.sharded else 0
    scatters = micro_batches if load.sharded else 2 * updates if load.processes > 1 else 0
    linear = load.shape.layers * load.part.linear_weights
    exchanged = gathers * load.itemsize * linear + scatters * FLOAT32 * load.trained
    rate = machine.link if load.processes <= GPUS_OF_MACHINE else machine.network
    ranks = load.shards if load.sharded else load.processes
    between = exchanged * (ranks - 1) / ranks / (machine.link_share * rate)
    return max(scoring + learning, between)


def forward_flops(shape: ModelShape, tokens: float, line: int, rows: float) -> float:
    """Return the operations of a forward pass: linear modules, causal attention, and the head."""
    layer = 2 * shape.linear_weights + 2 * shape.queries * line
    return tokens * shape.layers * layer + 2 * rows * shape.table_weights


def forward_seconds(
    shape: ModelShape, machine: GpuFigures, tokens: float, line: int, rows: float, *, bf16: bool
) -> float:
    """Return the seconds of a forward pass without gradient, and of its rows."""
    itemsize = BFLOAT16 if bf16 else FLOAT32
    width = 3 * itemsize * shape.intermediate + 6 * FLOAT32 * shape.hidden
    width += 4 * itemsize * shape.queries
    traffic = 2 * tokens * shape.layers * width + 3 * FLOAT32 * rows * shape.vocabulary
    products = forward_flops(shape, tokens, line, rows) / machine.products(bf16=bf16)
    return products + traffic / machine.traffic


def update_seconds(
    load: Load,
    machine: GpuFigures,
    tokens: float,
    rows: float,
    micro_batches: int,
    updates: int = 1,
) -> float:
    """Return the seconds of the updates of one process: forward, backward, clipping, AdamW.

    Recomputed layers run forward twice; "selective" repeats only what is not a matrix product.
    Adapters save the gradients of the frozen weights.
    """
    shape = load.part
    body = forward_flops(shape, tokens, load.line, 0)
    head = 2 * rows * shape.table_weights
    recomputed = 0.0
    if load.checkpointing and load.checkpointing != "selective":
        recomputed = 1 / int(load.checkpointing)
    flops = body * ((2 if load.lora else 3) + recomputed) + head * (3 if load.trains_head else 2)
    traffic = (
        tokens
        * shape.layers
        * saved_per_token(load)
        * (_ACTIVATION_PASSES + 2 * bool(load.checkpointing))
    )
    traffic += rows * shape.vocabulary * _LOGIT_BYTES
    traffic += updates * _OPTIMIZER_BYTES * load.trained / load.shards
    # Copies of the weights in the compute dtype, and gradients added to earlier gradients.
    traffic += micro_batches * (FLOAT32 + BFLOAT16 + 3 * FLOAT32) * load.trained
    return flops / machine.products(bf16=load.bf16) + traffic / machine.traffic


def sampling_seconds(
    shape: ModelShape,
    machine: GpuFigures,
    answers: int,
    line: int,
    new_tokens: int,
    itemsize: int,
    group: int = 1,
) -> float:
    """Return the seconds of an engine of `group` GPUs for `answers` answers of `new_tokens` tokens.

    Each decoding step reads all weights, and the keys and values of the answers in progress, which
    are as many as the memory of the group holds.
    """
    weights = itemsize * (shape.layers * shape.linear_weights + shape.table_weights)
    cache = 2 * itemsize * shape.keys * shape.layers * line  # of one answer at its end
    free = max(cache, group * USABLE * machine.size * GIB - itemsize * shape.weights)
    at_once = min(answers, max(1, int(free // cache)))
    mean_cache = cache * (line - new_tokens / 2) / line
    rounds = answers / at_once
    bf16 = itemsize == BFLOAT16
    flops = 2 * at_once * (shape.layers * shape.linear_weights + shape.table_weights)
    read = (weights + at_once * mean_cache) / machine.traffic
    # The records of a token (head ids, draws) read its logits a few times.
    records = 6 * FLOAT32 * at_once * shape.vocabulary / machine.traffic
    token = (max(read, flops / machine.products(bf16=bf16)) + records) / group + machine.launch
    prompt = answers * (line - new_tokens)
    prefill = forward_seconds(shape, machine, prompt, line, 0, bf16=bf16) / group
    return prefill + rounds * new_tokens * token


def best_split(
    job: AnyTraining, shape: ModelShape, machine: GpuFigures, longest: int | None
) -> tuple[Split, StepTime] | None:
    """Return the split of the job's GPUs with the fastest step that fits, and its time.

    None if the job has neither engines nor a teacher of its own on other GPUs, or if no split fits.
    """
    teacher = 0 if job.started_teacher is None else job.started_teacher.gpus_of_model
    total = job.processes + job.engine_gpus + teacher
    if total == job.processes:
        return None
    usable = round(USABLE * machine.size * GIB)
    group = 1 if job.rollout_engine is None else job.rollout_engine.tensor_parallel_size
    fastest: tuple[Split, StepTime] | None = None
    for engines in range(group, total, group) if job.engine_gpus else [0]:
        for scorers in range(1, total - engines) if teacher else [0]:
            processes = total - engines - scorers
            if not 0 < processes <= job.max_processes:
                continue
            if processes % (job.train.tensor_parallel * job.train.context_parallel):
                continue
            tables = {"train": {"processes": processes}}
            tables |= {"rollouts": {"gpus": engines}} if engines else {}
            tables |= {"teacher": {"gpus": scorers}} if scorers else {}
            tried_job = with_changes(job, tables)
            load = load_of(tried_job, shape, longest, usable=usable)
            if peak_bytes(load) > usable:
                continue
            time = step_time(tried_job, shape, load, machine)
            if fastest is None or time.seconds < fastest[1].seconds:
                fastest = Split(processes, engines, scorers), time
    return fastest
