"""The memory of one process of a training job, computed from the sizes of the student.

A process always holds weights, optimizer state and anchor. Each stage of a step (sampling, scoring,
learning, optimizer) needs additional memory. The stage with the largest memory determines the peak.
docs/training.md explains each line, and `benchmarks/models/memory_plan.py` compares the plan with
measurements.

The plan excludes loading, memory outside PyTorch (CUDA context, NCCL: about 1 GiB), and
fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from clients.data.models.shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
# Bytes per vocabulary entry of a sequence in one sampling step, most of them float64 running sums.
_SAMPLING_BYTES = 48
# Values that share a float32 scale in an 8-bit moment, and the minimum size of a weight with such
# moments: `student_trainer/checkpoints/optimizer_state.py`.
_BLOCK, _MIN_SIZE = 64, 4096


@dataclass(frozen=True)
class Load:
    """The quantities that determine the memory of a process.

    - shape: the sizes of the student.
    - processes: number of processes of the job.
    - sharded: whether FSDP2 shards over `processes`; otherwise DDP or a single process.
    - tensor_parallel: size of the groups that share the layers.
    - context_parallel: size of the groups that share the tokens of a micro-batch.
    - bf16: whether the compute dtype is bfloat16; otherwise float32.
    - checkpointing: the key `student.gradient_checkpointing`.
    - lora: rank of the adapters; 0 trains all weights.
    - train_head: whether the head is trained in addition to adapters.
    - tokens: padded tokens of a micro-batch.
    - line: tokens of the longest sequence of a micro-batch.
    - sampled: number of sequences sampled together; 0 if the process does not sample.
    - sampled_line: tokens of each sampled sequence, with its prompt.
    - sampled_prompt: number of the first tokens of a sampled sequence that one forward pass reads.
    - anchor: whether the process holds an anchor.
    - narrow_moments: whether AdamW has moments in 8 bits.
    - critic_tokens: tokens of a step whose hidden states the critic reads; 0 without a critic.
    - cuda: whether the process uses a GPU; otherwise a CPU.
    - gpu_bytes: memory of the GPU, which determines the rows of a chunk of logits.
    - engine: bytes of a rollout engine on the same GPU.
    - engine_sleeps: whether the engine frees these bytes while the trainer learns.
    - cpu_offload: whether the shards are in host memory.
    """

    shape: ModelShape
    processes: int
    sharded: bool
    bf16: bool
    checkpointing: bool | int | str
    tokens: int
    line: int
    sampled: int = 0
    sampled_line: int = 0
    sampled_prompt: int = 0
    lora: int = 0
    train_head: bool = False
    anchor: bool = False
    critic_tokens: int = 0
    narrow_moments: bool = False
    cuda: bool = True
    gpu_bytes: int = 80 << 30
    tensor_parallel: int = 1
    context_parallel: int = 1
    engine: int = 0
    engine_sleeps: bool = False
    cpu_offload: bool = False

    @property
    def shards(self) -> int:
        """Number of processes over which FSDP2 divides the weights.

        With tensor parallelism, these are the weights of one process of a group.
        """
        return self.processes // self.tensor_parallel if self.sharded else 1

    @property
    def part(self) -> ModelShape:
        """The sizes of the part of the student that one process of a tensor-parallel group has.

        A process has its part of the heads and of the MLP units.
        """
        group = self.tensor_parallel
        return replace(
            self.shape,
            heads=self.shape.heads // group,
            kv_heads=self.shape.kv_heads // group,
            intermediate=self.shape.intermediate // group,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return BFLOAT16 if self.bf16 else FLOAT32

    @property
    def trained_layer(self) -> int:
        """Number of trainable weights of a layer, in the part of one process."""
        if self.lora:
            return sum(self.lora * (inside + out) for inside, out in self.part.linear_modules)
        return self.part.linear_weights + self.part.other_weights

    @property
    def trained_root(self) -> int:
        """Number of trainable weights outside the layers."""
        if self.lora:
            return self.shape.table_weights * self.train_head
        return self.shape.root_weights

    @property
    def trained(self) -> int:
        """Number of trainable weights in the part of one process. Their dtype is float32."""
        return self.shape.layers * self.trained_layer + self.trained_root

    @property
    def trained_matrices(self) -> list[tuple[int, int]]:
        """(rows, row length) of every trainable matrix."""
        layer = self.shape.linear_modules
        if self.lora:
            pairs = [((self.lora, inside), (out, self.lora)) for inside, out in layer]
            shapes = [matrix for pair in pairs for matrix in pair] * self.shape.layers
        else:
            shapes = [(out, inside) for inside, out in layer] * self.shape.layers
        table = (self.shape.vocabulary, self.shape.hidden)
        return shapes + [table] * (self.trained_root // self.shape.table_weights)

    @property
    def frozen(self) -> int:
        """Number of frozen weights. Their dtype is the compute dtype."""
        return self.part.weights - (self.trained_root if self.lora else self.trained)

    @property
    def trains_head(self) -> bool:
        """Whether the head has a gradient."""
        return self.trained_root > 0

    @property
    def residual(self) -> int:
        """Bytes of a number in the residual stream, whose dtype is that of the embeddings."""
        trained = not self.lora or (self.train_head and self.shape.tied)
        return FLOAT32 if trained else self.itemsize


def resident_bytes(load: Load) -> dict[str, int]:
    """Return the bytes that a process holds on its GPU between two updates, by part.

    The parts are:

    - the float32 weights, AdamW's two moments and the anchor, divided by the number of shards
    - frozen weights in the compute dtype
    - the critic, with one weight per unit of the hidden states
    - DDP's gradient buffers, which stay after the first backward pass
    - a rollout engine on the same GPU

    The moments are float32, or 8 bits with a scale per block.
    """
    buffers = 0 if load.sharded or load.processes == 1 else FLOAT32 * load.trained
    return {
        **{name: count * (not load.cpu_offload) for name, count in share_bytes(load).items()},
        "critic": 4 * FLOAT32 * (load.shape.hidden + 1) * bool(load.critic_tokens),
        "DDP buckets": buffers,
        "rollout engine": 0 if load.engine_sleeps else load.engine,
    }


def share_bytes(load: Load) -> dict[str, int]:
    """Return the bytes of the weights, the optimizer state and the anchor of a process, by part.

    The bytes are on the GPU, or on the host with CPU offload.
    """
    trained, shards = load.trained, load.shards
    return {
        "weights": (FLOAT32 * trained + load.itemsize * load.frozen) // shards,
        "optimizer": _moment_bytes(load) // shards,
        "anchor": FLOAT32 * trained // shards * load.anchor,
    }


def host_bytes(load: Load) -> int:
    """Return the peak host memory of a process, in bytes; 0 without CPU offload."""
    gradients = FLOAT32 * load.trained // load.shards
    return (sum(share_bytes(load).values()) + gradients) * load.cpu_offload


def _gradient_bytes(load: Load) -> int:
    """Return the bytes of gradients on a GPU; with CPU offload, the gradients of one layer."""
    on_gpu = max(load.trained_layer, load.trained_root) if load.cpu_offload else load.trained
    return FLOAT32 * on_gpu // load.shards


def _moment_bytes(load: Load) -> int:
    """Return the bytes of AdamW's two moments of all trainable weights."""
    in_8bit = 0
    if load.narrow_moments:
        matrices = [(rows * length, length) for rows, length in load.trained_matrices]
        in_8bit = sum(n for n, length in matrices if n >= _MIN_SIZE and length % _BLOCK == 0)
    return 2 * (FLOAT32 * (load.trained - in_8bit) + in_8bit + FLOAT32 * in_8bit // _BLOCK)


def saved_per_token(load: Load) -> int:
    """Return the bytes per token that autograd saves in one layer for its backward pass.

    The result is for a layer without gradient checkpointing. The terms in the code have the order
    of the layer: both norms, queries and keys, attention, MLP. Under autocast, a linear module
    saves a bfloat16 copy of its input.
    """
    s, c = load.part, load.itemsize
    h, q, k, i = s.hidden, s.queries, s.keys, s.intermediate
    norm = FLOAT32 * (h + 1)  # input, and 1 / root mean square
    if not load.lora:
        norm += FLOAT32 * h  # normalised: its weight learns
    # q, k and v read one norm, gate and up the other. Under autocast each has a copy of its own,
    # but not beside adapters that FSDP2 gathers in bfloat16: peft then casts no input.
    has_copies = load.bf16 and not (load.lora and load.sharded)
    copies = 5 * h if has_copies else 2 * h
    attention = c * (q + 2 * k + q) + FLOAT32 * s.heads  # q, k, v, output, log-sum-exp
    if (group := load.context_parallel) > 1:
        # A second output for the process's own tokens; repeated key-value heads, for equal shares.
        attention += c * (q + 2 * k * (group // math.gcd(s.kv_heads, group) - 1))
    if load.lora and has_copies:
        copies += q  # bfloat16 copy of the output projection's input
    mlp = c * 4 * i  # gate, its activation, up, their product
    saved = 2 * norm + c * copies + attention + mlp + c * len(s.linear_modules) * load.lora
    if s.query_norm:
        saved += FLOAT32 * (q + k + s.heads + s.kv_heads)
        saved += 0 if load.lora else c * (q + k)
    return saved + _math_attention(load)


def products_per_token(load: Load) -> int:
    """Return the bytes per token of a layer that gradient checkpointing "selective" saves.

    These are queries, keys, values, attention with its log-sum-exp, the output projection, and the
    three products of the MLP.
    """
    s, lora = load.part, load.itemsize * load.lora * len(load.shape.linear_modules)
    outputs = 2 * s.queries + 2 * s.keys + 2 * s.hidden + 2 * s.intermediate
    adapters = sum(out for _, out in s.linear_modules) if load.lora else 0
    return load.itemsize * (outputs + adapters) + FLOAT32 * s.heads + lora


def _math_attention(load: Load) -> int:
    """Return the bytes per token that the math attention kernel saves in addition to other kernels.

    All kernels save q, k, v and output. Only the flash kernels support grouped heads, and they do
    not support float32. In float32, a GPU therefore computes full score matrices [heads, line], and
    expands keys and values to all heads.
    """
    s = load.part
    if not load.cuda or load.bf16 or s.heads == s.kv_heads:
        return 0
    return FLOAT32 * (s.heads * load.line + 2 * s.queries)


def activation_bytes(load: Load) -> int:
    """Return the bytes of the activations that the forward pass of a micro-batch saves.

    The backward pass needs them. A layer that is recomputed saves only its input. With `selective`,
    it also saves its matrix products.
    """
    s, policy = load.shape, load.checkpointing
    input_ = load.residual * s.hidden
    if policy == "selective":
        saved = s.layers * (input_ + products_per_token(load))
    else:
        recomputed = math.ceil(s.layers / int(policy)) if policy else 0
        saved = recomputed * input_ + (s.layers - recomputed) * saved_per_token(load)
    final_norm = FLOAT32 * (s.hidden + 1) * (1 if load.lora else 2)  # the norm before the head
    return load.tokens * (saved + final_norm)


def count_chunk_rows(load: Load) -> int:
    """Return the number of rows in a chunk of logits.

    The formula is that of `student_trainer/losses/fused/projection.py`.
    """
    if not load.cuda:
        return max(128, (64 << 20) // (FLOAT32 * load.shape.vocabulary))
    row_bytes = (FLOAT32 + BFLOAT16) * load.shape.vocabulary
    return max(1024, min(4096, load.gpu_bytes // 32 // row_bytes // 128 * 128))


def head_bytes(load: Load, *, learns: bool) -> int:
    """Return the bytes of the fused operator for the head and the loss.

    These are a chunk of logits, copies of weights, and gradients. `learns`: whether the operator
    computes gradients.
    """
    s, c, bf16 = load.shape, load.itemsize, load.bf16
    rows = min(count_chunk_rows(load), load.tokens)
    total_bytes = rows * s.vocabulary * FLOAT32
    if bf16 and (learns or not load.cuda):
        # A GPU's gradient of the logits; a CPU's product, before it becomes float32.
        total_bytes += rows * s.vocabulary * BFLOAT16
    if bf16 and (not load.lora or load.train_head):
        total_bytes += BFLOAT16 * s.table_weights
    if learns and load.trains_head:
        total_bytes += FLOAT32 * s.table_weights
        if bf16 and not load.cuda:
            total_bytes += BFLOAT16 * s.table_weights  # one chunk's product
    states = FLOAT32 + (BFLOAT16 if bf16 else 0) + (c if learns else 0)
    return total_bytes + load.tokens * s.hidden * states


def learning_bytes(load: Load) -> dict[str, int]:
    """Return the peak bytes of an update, by part, in addition to the resident bytes."""
    s, c = load.part, load.itemsize
    all_tokens, load = load.tokens, replace(load, tokens=-(-load.tokens // load.context_parallel))
    parts = {"gradients": _gradient_bytes(load)}
    if load.sharded:
        parts |= gathered_by_layer(load)
        # FSDP2 casts a layer's gradient.
        parts["gathered gradients"] = (c + FLOAT32) * load.trained_layer
        parts["gathered gradients"] += FLOAT32 * load.trained_root
    elif load.bf16:
        linear = load.trained_layer if load.lora else s.linear_weights
        parts["bfloat16 weights"] = BFLOAT16 * s.layers * linear
    parts["activations"] = activation_bytes(load)
    at_loss = head_bytes(load, learns=True)
    # The backward pass of the MLP: two more tensors of its width, and the residual's gradient.
    backward = load.tokens * (2 * c * s.intermediate + load.residual * s.hidden)
    backward += 3 * _math_attention(load) * load.tokens
    if load.checkpointing:  # the input of the layer is saved already
        backward += load.tokens * (saved_per_token(load) - load.residual * s.hidden)
    if load.checkpointing == "selective":
        backward -= load.tokens * products_per_token(load)
    if load.checkpointing is True:
        backward -= parts.get("bfloat16 weights", 0) * (s.layers - 1) // s.layers
    at_peak = {"one layer": backward, "logits": at_loss}
    if load.context_parallel > 1:  # kept until the end of the forward pass
        at_peak["embeddings"] = load.residual * s.hidden * all_tokens
    widest = max(at_peak, key=at_peak.__getitem__)
    parts[widest] = at_peak[widest]
    return parts


def optimizer_bytes(load: Load) -> dict[str, int]:
    """Return the bytes of a step of AdamW, by part, in addition to the resident bytes.

    8-bit moments are updated in float32, for one weight at a time.
    """
    if load.cpu_offload:
        return {}
    parts = {"gradients": FLOAT32 * load.trained // load.shards}
    if load.narrow_moments:
        largest = max(rows * length for rows, length in load.trained_matrices)
        parts["temporary"] = 2 * FLOAT32 * largest // load.shards
    return parts


def gathered_by_layer(load: Load) -> dict[str, int]:
    """Return the bytes of the weights that FSDP2 gathers at the same time in one pass.

    FSDP2 gathers one layer after the other.
    """
    s, c = load.part, load.itemsize
    wide_itemsize = c if load.lora else FLOAT32
    layer = c * s.linear_weights + wide_itemsize * s.other_weights
    layer += c * load.trained_layer if load.lora else 0
    # A layer is gathered before the one before it is freed.
    return {"gathered weights": min(2, s.layers) * layer + wide_itemsize * s.root_weights}


def gathered_bytes(load: Load) -> dict[str, int]:
    """Return the bytes of the copies of weights for a pass that needs all weights at once, by part.

    With FSDP2, the process gathers all weights. Otherwise these are bfloat16 copies of the linear
    modules.
    """
    s, c = load.shape, load.itemsize
    linear = s.layers * s.linear_weights
    if load.sharded:
        adapters = s.layers * load.trained_layer if load.lora else 0
        other_weights = load.shape.weights - linear
        wide_itemsize = c if load.lora else FLOAT32
        return {"gathered weights": c * (linear + adapters) + wide_itemsize * other_weights}
    return {"bfloat16 weights": BFLOAT16 * linear} if load.bf16 and not load.lora else {}


def _forward_bytes(load: Load, tokens: int) -> int:
    """Return the peak bytes of a layer's forward pass without gradient; the peak is in the MLP.

    The terms are gate, up and their product, the residual, and two tensors of the float32 norm.
    Adapters add an output, and read a float32 copy of a bfloat16 input.
    """
    s, c = load.part, load.itemsize
    width, inputs = 3 * c * s.intermediate, load.residual + 2 * FLOAT32
    if load.lora:
        width += c * s.intermediate
        inputs += FLOAT32 * load.bf16
    return tokens * (width + inputs * s.hidden)


def sampling_bytes(load: Load) -> dict[str, int]:
    """Return the bytes of sampling, by part, in addition to the resident bytes.

    The result is {} if the process does not sample. A rollout engine that sleeps while the trainer
    learns is included here and in `scoring_bytes`.
    """
    if awake := _awake_engine(load):
        return awake
    if not load.sampled:
        return {}
    s, tokens = load.shape, load.sampled * load.sampled_line
    cache = 2 * load.itemsize * s.keys * tokens
    parts = gathered_bytes(load) | {"key-value cache": cache * s.layers}
    table = BFLOAT16 * s.table_weights if load.bf16 and not load.lora else 0
    parts["logits"] = load.sampled * s.vocabulary * _SAMPLING_BYTES + table
    prefill = _forward_bytes(replace(load, tensor_parallel=1), load.sampled * load.sampled_prompt)
    parts["one layer"] = max(cache // 2, prefill)  # the cache is extended by a copy, layer by layer
    return parts


def _awake_engine(load: Load) -> dict[str, int]:
    """Return the bytes of an engine that sleeps only while the trainer learns; {} without one."""
    return {"rollout engine": load.engine} if load.engine and load.engine_sleeps else {}


def scoring_bytes(load: Load) -> dict[str, int]:
    """Return the bytes of a forward pass without gradient over a micro-batch, by part.

    Such passes compute the rows of the anchor, or evaluate held-out data.
    """
    load = replace(load, tokens=-(-load.tokens // load.context_parallel))
    layer = _forward_bytes(load, load.tokens) + _math_attention(load) * load.tokens
    weights = gathered_by_layer(load) if load.sharded else gathered_bytes(load)
    parts = weights | {"one layer": layer, "logits": head_bytes(load, learns=False)}
    parts |= _awake_engine(load)
    if load.critic_tokens:  # float32, and a copy of the states with a known reward
        parts["states for the critic"] = 2 * FLOAT32 * load.shape.hidden * load.critic_tokens
    return parts


def stage_bytes(load: Load) -> dict[str, dict[str, int]]:
    """Return the bytes of each stage, by part, in addition to the resident bytes.

    The parts of a stage are {} if the job does not have the stage.
    """
    return {
        "sampling": sampling_bytes(load),
        "scoring": scoring_bytes(load),
        "learning": learning_bytes(load),
        "optimizer": optimizer_bytes(load),
    }


def peak_bytes(load: Load) -> int:
    """Return the peak bytes of a process: the resident bytes and the bytes of the largest stage."""
    stages = stage_bytes(load).values()
    return sum(resident_bytes(load).values()) + max(sum(parts.values()) for parts in stages)
