"""The seconds of a step, computed from the sizes of the models and the figures of a machine.

A step has four parts: the rollouts, the teacher's rows, the trainer (anchor, p_old, updates), and
the push of new weights to the engines.

- The time of a forward or backward pass is the longer of two times: matrix products plus memory
  traffic, or the launches by the host.
- The time of a decoding step is the longest of three times (matrix products; reads of weights and
  cache; launches by the host), plus the time to create its outputs (head ids, draws).
- A CPU overlaps none of these times, so they add up.
- The trainer's GPUs exchange data while they compute, so the trainer's part takes the longer of
  these two times.

Answers have the maximum length that the job allows, so the seconds are an upper bound for a job
whose answers end early. `benchmarks/models/step_time.py` compares the formulas with jobs on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clients.config.kinds import AnyTraining
from clients.data.models.shape import ModelShape, read_shape
from clients.plan.machines import GPUS_OF_MACHINE, MachineFigures
from clients.plan.memory import BFLOAT16, FLOAT32, Load, peak_bytes
from clients.plan.memory_plan import GIB, USABLE, load_of, with_changes
from protos.errors import InvalidInput, Unavailable

# Bytes per entry of a chunk of logits of the fused operator. A GPU: written, read twice, and its
# gradient written once and read by two products. A CPU (`softmax_torch`) has a pass for each of the
# maximum 4, difference 8, limit 8, exp 8, sum 4, product 12, sum 4, copy 8 and scale 8.
_LOGIT_BYTES = {True: 3 * FLOAT32 + 3 * BFLOAT16, False: FLOAT32 + 64 + 2 * FLOAT32}
# Bytes per trained weight of clipping and AdamW: norm 4, scaling 8, reading w, m, v and the
# gradient 16, writing w, m and v 12, clearing 4.
_OPTIMIZER_BYTES = 44
# Operations of the backward pass of attention, in forward passes: it computes the scores again.
_ATTENTION_BACKWARD = 2.5
# Launches of the host for forward and backward pass of a layer, in forward passes.
_UPDATE_LAUNCHES = 3
# Bytes per vocabulary entry of the records of a sampled token (`sample_step`): the float32 copy of
# the logits 8, division 8, log-softmax 8, top-k 4, float64 copy 12, exp 16, running sums 16, sums
# of groups 8, the logits that `generate` gets 8.
_RECORD_BYTES = 88
# Bytes per draw of a sampled token, for the 64 entries of its group (`draw_tail`): ids 16, limit
# 16, padding 9, probabilities 24, mask 16, running sums 16, zeros 25, running maxima 24.
_DRAW_BYTES = 64 * 146
_VLLM_SEQUENCES = 256  # answers in progress: `rollout_service/engines/vllm_start.py`
_TEACHER_BATCH = 16384  # tokens of a batch: the default of `distill-teacher --max-batch-tokens`


@dataclass(frozen=True)
class StepTime:
    """The seconds of the parts of a step, and of the whole step.

    - parts: seconds of "rollouts", "teacher", "trainer" and "push", without parts that the job does
      not have.
    - lag: the key `rollouts.lag`.
    - batches: number of batches in which the rows of a step arrive from the teacher.
    - without_teacher: whether `parts` lack the seconds of the job's teacher, because the size of
      its model is not known.
    """

    parts: Mapping[str, float]
    lag: int = 0
    batches: float = 1.0
    without_teacher: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step.

        The trainer learns from the first rows while the teacher scores the next rows. Therefore the
        trainer only waits for the first batch of rows after the rollouts. With a lag of 1, this
        wait overlaps with the trainer. With a lag of 2, the wait also overlaps with the next
        rollouts.
        """
        rollouts, teacher = self.parts.get("rollouts", 0.0), self.parts.get("teacher", 0.0)
        wait, trainer = teacher / self.batches, self.parts["trainer"]
        push = self.parts.get("push", 0.0)
        if self.lag == 0:
            return rollouts + max(wait + trainer, teacher) + push
        return max(rollouts + wait * (self.lag == 1), teacher, trainer + push)

    @property
    def bottleneck(self) -> str:
        """The name of the part with the most seconds."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True)
class Split:
    """The number of GPUs of the trainer, of the rollout engines and of the teacher."""

    trainer: int
    engines: int
    teacher: int


def step_time(job: AnyTraining, shape: ModelShape, load: Load, machine: MachineFigures) -> StepTime:
    """Return the seconds of a step of the job. Loads no weights.

    `shape`: the sizes of the student. `load`: the result of `load_of`.
    """
    step_tokens = job.sequences_per_step * load.line
    rows = job.sequences_per_step * (job.method.max_new_tokens if job.samples else load.line)
    parts = {"trainer": _trainer_seconds(job, load, machine, step_tokens, rows)}
    rollouts, batches = job.rollout_engine, 1.0
    if job.samples:
        engines = load.processes if rollouts is None else max(1, rollouts.replicas)
        sampling = SamplingLoad(
            shape,
            answers=math.ceil(job.sequences_per_step / engines),
            line=load.line,
            new_tokens=job.method.max_new_tokens,
            itemsize=load.itemsize,
            draws=getattr(job, "draws", 0),
            batch=max(1, 4 * job.train.tokens_per_micro_batch // load.line),
        )
        if rollouts is not None and rollouts.engine == "vllm":
            batch = sampling.count_at_once(machine, rollouts.tensor_parallel_size)
            sampling = replace(
                sampling, batch=batch, group=rollouts.tensor_parallel_size, vllm=True
            )
        parts["rollouts"] = sampling_seconds(sampling, machine)
        batches = sampling.rounds
        if rollouts is not None:
            # Weights in the compute dtype to files in host memory, and from there to each engine.
            parts["push"] = 2 * load.itemsize * shape.weights / machine.host
    if (teacher := _teacher_shape(job)) is not None and job.started_teacher is not None:
        gpus = max(1, job.started_teacher.gpus_of_model)
        seconds = forward_seconds(teacher, machine, step_tokens, load.line, rows, bf16=load.bf16)
        teacher_batches = math.ceil(step_tokens / _TEACHER_BATCH)
        launches = teacher_batches * teacher.layers * machine.layer_launch
        parts["teacher"] = machine.together(seconds, launches) / gpus
        batches = max(batches, teacher_batches)
    has_teacher = bool(job.teacher_addresses) or job.started_teacher is not None
    return StepTime(
        parts,
        lag=0 if rollouts is None else rollouts.lag,
        batches=batches,
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
    job: AnyTraining, load: Load, machine: MachineFigures, tokens: int, rows: int
) -> float:
    """Return the seconds of anchor rows, p_old and all updates of a step.

    `tokens`, `rows`: numbers in a step, over all processes.
    """
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
    launches = micro_batches * (passes + _UPDATE_LAUNCHES + bool(load.checkpointing))
    host = launches * load.shape.layers * machine.layer_launch
    return machine.together(scoring + learning, between, host)


def _product_seconds(
    shape: ModelShape,
    machine: MachineFigures,
    tokens: float,
    line: int,
    *,
    linear: float,
    attention: float,
    bf16: bool,
) -> float:
    """Return the seconds of the matrix products of the layers.

    `linear`, `attention`: number of products of linear modules and of attention, in units of one
    forward pass. Causal attention computes half of the scores of a sequence of `line` tokens.
    """
    linear_flops = 2 * shape.linear_weights * linear / machine.products(bf16=bf16)
    attention_flops = 2 * shape.queries * line * attention / machine.attention(bf16=bf16)
    return tokens * shape.layers * (linear_flops + attention_flops)


def _layer_bytes(shape: ModelShape, itemsize: int) -> tuple[int, int]:
    """Return the bytes per token that a layer's elementwise operations read and write.

    The first number is for the forward pass, the second for the backward pass. The operators of
    transformers read and write one tensor after the other. The terms are:

    - norms (both, and those of queries and keys) in float32: forward square 8, mean 4, scale 8,
      weight 8, casts of bfloat16 12; backward weight 24, scale 28, square 16, sum 8
    - residual: two sums, and two sums of gradients, of 12 each
    - rotation of queries and keys: forward 10 numbers, backward 12
    - copies of the output of attention: 2 numbers
    - SwiGLU: forward silu 2 and product 3, backward product 6 and silu 3
    """
    rotated = shape.queries + shape.keys
    normed = 2 * shape.hidden + rotated * shape.query_norm
    residual = 2 * 3 * FLOAT32 * shape.hidden
    copies = 2 * itemsize * shape.queries
    casts = 12 * (itemsize == BFLOAT16)
    forward = (28 + casts) * normed + residual + copies
    forward += itemsize * (10 * rotated + 5 * shape.intermediate)
    backward = (76 + casts) * normed + residual + copies
    backward += itemsize * (12 * rotated + 9 * shape.intermediate)
    return forward, backward


def forward_seconds(
    shape: ModelShape, machine: MachineFigures, tokens: float, line: int, rows: float, *, bf16: bool
) -> float:
    """Return the seconds of a forward pass without gradient over `tokens` tokens.

    The seconds include the logits of `rows` rows. `line`: tokens of a sequence.
    """
    forward, _ = _layer_bytes(shape, BFLOAT16 if bf16 else FLOAT32)
    traffic = tokens * shape.layers * forward + 3 * FLOAT32 * rows * shape.vocabulary
    head = 2 * rows * shape.table_weights / machine.products(bf16=bf16)
    products = _product_seconds(shape, machine, tokens, line, linear=1, attention=1, bf16=bf16)
    return products + head + traffic / machine.traffic


def update_seconds(
    load: Load,
    machine: MachineFigures,
    tokens: float,
    rows: float,
    micro_batches: int,
    updates: int = 1,
) -> float:
    """Return the seconds of the updates of one process: forward, backward, clipping, AdamW.

    Layers that are recomputed run forward twice. With "selective", the second forward pass has no
    matrix products. With adapters, no gradients of the frozen weights are computed.
    """
    shape = load.part
    selective = load.checkpointing == "selective"
    repeated = 0.0 if not load.checkpointing else 1.0 if selective else 1 / int(load.checkpointing)
    recomputed = 0.0 if selective else repeated
    seconds = _product_seconds(
        shape,
        machine,
        tokens,
        load.line,
        linear=(2 if load.lora else 3) + recomputed,
        attention=1 + _ATTENTION_BACKWARD + recomputed,
        bf16=load.bf16,
    )
    head = 2 * rows * shape.table_weights * (3 if load.trains_head else 2)
    seconds += head / machine.products(bf16=load.bf16)
    forward, backward = _layer_bytes(shape, load.itemsize)
    traffic = tokens * shape.layers * ((1 + repeated) * forward + backward)
    traffic += rows * shape.vocabulary * _LOGIT_BYTES[load.cuda]
    traffic += updates * _OPTIMIZER_BYTES * load.trained / load.shards
    # Copies of the weights in the compute dtype, and gradients added to earlier gradients.
    copies = (FLOAT32 + BFLOAT16) * load.bf16
    traffic += micro_batches * (copies + 3 * FLOAT32) * load.trained
    return seconds + traffic / machine.traffic


@dataclass(frozen=True)
class SamplingLoad:
    """The answers that one engine samples in a step.

    - shape: the sizes of the student.
    - answers: number of answers.
    - line: tokens of an answer with its prompt.
    - new_tokens: number of the last of these tokens, which are sampled.
    - itemsize: bytes of a number.
    - draws: ids per token that are drawn from the tail.
    - batch: number of answers in progress at a time.
    - group: number of GPUs of the engine.
    - vllm: whether vLLM samples, with CUDA graphs and a paged cache; otherwise transformers.
    """

    shape: ModelShape
    answers: int
    line: int
    new_tokens: int
    itemsize: int
    draws: int
    batch: int
    group: int = 1
    vllm: bool = False

    @property
    def rounds(self) -> int:
        """Number of batches, which are sampled one after the other."""
        return math.ceil(self.answers / self.batch)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one complete answer."""
        return 2 * self.itemsize * self.shape.keys * self.shape.layers * self.line

    def count_at_once(self, machine: MachineFigures, group: int) -> int:
        """Return the number of answers that vLLM can have in progress at a time.

        Their keys and values must fit in the memory of `group` GPUs.
        """
        free = group * USABLE * machine.size * GIB - self.itemsize * self.shape.weights
        return min(_VLLM_SEQUENCES, max(1, int(free // self.cache_bytes)))


def sampling_seconds(sampling: SamplingLoad, machine: MachineFigures) -> float:
    """Return the seconds that an engine needs to sample all answers.

    Each decoding step reads all weights, and the keys and values of the answers in progress.
    transformers also copies these keys and values in each step. On a CPU, the operating system
    clears the pages of the copy.
    """
    shape, itemsize, group = sampling.shape, sampling.itemsize, sampling.group
    at_once = sampling.answers / sampling.rounds
    weights = shape.layers * shape.linear_weights + shape.table_weights
    mean_cache = sampling.cache_bytes * (1 - sampling.new_tokens / 2 / sampling.line)
    passes = 1 if sampling.vllm else 3 if machine.overlaps else 5
    read = itemsize * weights + at_once * mean_cache * passes
    bf16 = itemsize == BFLOAT16
    products = 2 * at_once * weights / machine.products(bf16=bf16)
    launches = machine.engine_launch
    if not sampling.vllm:
        launches = shape.layers * machine.layer_launch + machine.token_launch
    records = at_once * (_RECORD_BYTES * shape.vocabulary + _DRAW_BYTES * sampling.draws)
    token = machine.together(read / machine.reads / group, products / group, launches)
    token += records / machine.traffic / group
    prompts = sampling.answers * (sampling.line - sampling.new_tokens)
    prefill = forward_seconds(shape, machine, prompts, sampling.line, 0, bf16=bf16) / group
    return prefill + sampling.rounds * sampling.new_tokens * token


def best_split(
    job: AnyTraining, shape: ModelShape, machine: MachineFigures, longest: int | None
) -> tuple[Split, StepTime] | None:
    """Return the split of the job's GPUs with the fastest step that fits, and its time.

    Returns None if no split fits, or if there is nothing to split: the job has neither engines nor
    a started teacher with GPUs of their own. `longest`: see `MemoryPlan`.
    """
    teacher = 0 if job.started_teacher is None else job.started_teacher.gpus_of_model
    total = job.processes + job.engine_gpus + teacher
    if total == job.processes:
        return None
    usable = round(USABLE * machine.size * GIB)
    teacher_gpus = _list_teacher_gpus(job, total, usable) if teacher else [0]
    group = 1 if job.rollout_engine is None else job.rollout_engine.tensor_parallel_size
    fastest: tuple[Split, StepTime] | None = None
    for engines in range(group, total, group) if job.engine_gpus else [0]:
        for scorers in teacher_gpus:
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


def _list_teacher_gpus(job: AnyTraining, total: int, usable: int) -> Sequence[int]:
    """Return the numbers of GPUs, below `total`, that can run the job's started teacher.

    vLLM needs that the number divides the heads, the units of the MLP, and the vocabulary, which it
    pads to a multiple of 64. If there are more GPUs than heads of keys, it repeats these heads. The
    weights, in the dtype float32 or one of 2 bytes, must fit in `usable` bytes of each GPU. If the
    sizes of the teacher are not known, or its engine uses one GPU, the job's own number is the only
    one.
    """
    teacher, shape = job.started_teacher, _teacher_shape(job)
    if teacher is None:
        return [0]
    if shape is None or teacher.engine != "vllm":
        return [teacher.gpus_of_model]
    weight_bytes = (FLOAT32 if teacher.dtype == "float32" else BFLOAT16) * shape.weights
    counts = (shape.heads, shape.intermediate, 64 * math.ceil(shape.vocabulary / 64))
    return [
        gpus
        for gpus in range(1, total)
        if all(count % gpus == 0 for count in counts)
        and max(shape.kv_heads, gpus) % min(shape.kv_heads, gpus) == 0
        and weight_bytes <= gpus * usable
    ]
