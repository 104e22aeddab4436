"""The memory of one process of a training job, computed from the sizes of the student.

A process holds weights, optimizer state and anchor all the time. Beside them, each stage of a step
needs memory of its own: sampling, scoring, learning, the optimizer. The peak is that of the stage
that needs most. `docs/training.md` explains each line, `benchmarks/memory_plan.py` measures them.

Left out: loading, memory outside PyTorch (CUDA context, NCCL: about 1 GiB), and fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from clients.data.model_shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
# Bytes of a chunk of logits, and its fewest rows: `student_trainer/losses/projection.py`.
_CHUNKS = {"cuda": (640 << 20, 1024), "cpu": (64 << 20, 128)}
# Bytes per vocabulary entry of a sequence in one sampling step, most of them float64 running sums.
_SAMPLING_BYTES = 48
# Numbers that share a float32 scale in a moment of 8 bits, and the fewest of a weight with such
# moments: `student_trainer/checkpoints/optimizer_state.py`.
_BLOCK, _FEWEST = 64, 4096


@dataclass(frozen=True)
class Load:
    """What decides the memory of a process.

    sharded: FSDP2 over `processes`; otherwise DDP, or a single process. tensor_parallel: processes
    of a group that divides the layers. context_parallel: processes of a group that divides the
    tokens of a micro-batch. bf16: dtype of the computation. checkpointing: the key
    `student.gradient_checkpointing`. lora: rank of the adapters; 0 trains all weights. train_head:
    with adapters, the head too. tokens: padded tokens of a micro-batch. line: tokens of its longest
    sequence. sampled: sequences that are sampled at a time, of `sampled_line` tokens each, of which
    the first `sampled_prompt` are read in one forward pass; 0: none. narrow_moments: AdamW's
    moments are in 8 bits. critic_tokens: tokens of a step whose hidden states the critic reads; 0:
    no critic. cuda: a GPU, or the CPU. engine: bytes of a rollout engine on the same GPU.
    engine_sleeps: it frees them while the trainer learns. cpu_offload: shards lie in host memory.
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
    tensor_parallel: int = 1
    context_parallel: int = 1
    engine: int = 0
    engine_sleeps: bool = False
    cpu_offload: bool = False

    @property
    def shards(self) -> int:
        """Number of processes over which FSDP2 shards what a process of a group has."""
        return self.processes // self.tensor_parallel if self.sharded else 1

    @property
    def part(self) -> ModelShape:
        """The sizes of what a process of a group computes: its heads, its units of the MLP."""
        group = self.tensor_parallel
        return replace(
            self.shape,
            heads=self.shape.heads // group,
            kv_heads=self.shape.kv_heads // group,
            intermediate=self.shape.intermediate // group,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the computation."""
        return BFLOAT16 if self.bf16 else FLOAT32

    @property
    def trained_layer(self) -> int:
        """Number of trainable weights of a layer, of the part that a process computes."""
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
        """Number of trainable weights of the part that a process computes; they are float32."""
        return self.shape.layers * self.trained_layer + self.trained_root

    @property
    def trained_matrices(self) -> list[tuple[int, int]]:
        """(rows, row length) of every trainable weight that is a matrix."""
        layer = self.shape.linear_modules
        if self.lora:
            pairs = [((self.lora, inside), (out, self.lora)) for inside, out in layer]
            found = [matrix for pair in pairs for matrix in pair] * self.shape.layers
        else:
            found = [(out, inside) for inside, out in layer] * self.shape.layers
        table = (self.shape.vocabulary, self.shape.hidden)
        return found + [table] * (self.trained_root // self.shape.table_weights)

    @property
    def frozen(self) -> int:
        """Number of frozen weights; they have the dtype of the computation."""
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


def held(load: Load) -> dict[str, int]:
    """Return the bytes that a process holds on its GPU between two updates.

    float32 weights, AdamW's two moments and the anchor, divided by the shards; frozen weights in
    the dtype of the computation. The moments are float32, or in 8 bits with a scale per block. DDP
    keeps its buffers of gradients from the first backward pass on. The critic has one weight per
    unit of the hidden states. A rollout engine may work beside the trainer.
    """
    buffers = 0 if load.sharded or load.processes == 1 else FLOAT32 * load.trained
    return {
        **{name: count * (not load.cpu_offload) for name, count in shares(load).items()},
        "critic": 4 * FLOAT32 * (load.shape.hidden + 1) * bool(load.critic_tokens),
        "DDP buckets": buffers,
        "rollout engine": 0 if load.engine_sleeps else load.engine,
    }


def shares(load: Load) -> dict[str, int]:
    """Return the bytes of a process's weights, optimizer state and anchor, on GPU or host."""
    trained, shards = load.trained, load.shards
    return {
        "weights": (FLOAT32 * trained + load.itemsize * load.frozen) // shards,
        "optimizer": _moments(load) // shards,
        "anchor": FLOAT32 * trained // shards * load.anchor,
    }


def on_host(load: Load) -> int:
    """Return the most bytes of host memory that a process needs for its shares; 0: none there."""
    gradients = FLOAT32 * load.trained // load.shards
    return (sum(shares(load).values()) + gradients) * load.cpu_offload


def _gradients(load: Load) -> int:
    """Return the bytes of gradients on a GPU; offloaded ones leave it layer by layer."""
    on_gpu = max(load.trained_layer, load.trained_root) if load.cpu_offload else load.trained
    return FLOAT32 * on_gpu // load.shards


def _moments(load: Load) -> int:
    """Return the bytes of AdamW's two moments of all trainable weights."""
    narrow = 0
    if load.narrow_moments:
        sizes = [(rows * length, length) for rows, length in load.trained_matrices]
        narrow = sum(of for of, length in sizes if of >= _FEWEST and length % _BLOCK == 0)
    return 2 * (FLOAT32 * (load.trained - narrow) + narrow + FLOAT32 * narrow // _BLOCK)


def saved_per_token(load: Load) -> int:
    """Return the bytes per token that autograd saves in one layer for its backward pass.

    Without gradient checkpointing. The order below is that of the layer: both norms, queries and
    keys, attention, MLP. Under autocast, a linear module saves a bfloat16 copy of its input.
    """
    s, c = load.part, load.itemsize
    h, q, k, i = s.hidden, s.queries, s.keys, s.intermediate
    norm = FLOAT32 * (h + 1)  # input, and 1 / root mean square
    if not load.lora:
        norm += FLOAT32 * h  # normalised: its weight learns
    # q, k and v read one norm, gate and up the other. Under autocast each has a copy of its own,
    # but not beside adapters that FSDP2 gathers in bfloat16: peft then casts no input.
    own = load.bf16 and not (load.lora and load.sharded)
    copies = 5 * h if own else 2 * h
    attention = c * (q + 2 * k + q) + FLOAT32 * s.heads  # q, k, v, output, log-sum-exp
    if (group := load.context_parallel) > 1:
        # The output once more, for own tokens; repeated heads, so that each process has as many.
        attention += c * (q + 2 * k * (group // math.gcd(s.kv_heads, group) - 1))
    if load.lora and own:
        copies += q  # of the output projection's input, beside the output itself
    mlp = c * 4 * i  # gate, its activation, up, their product
    saved = 2 * norm + c * copies + attention + mlp + c * len(s.linear_modules) * load.lora
    if s.query_norm:
        saved += FLOAT32 * (q + k + s.heads + s.kv_heads)
        saved += 0 if load.lora else c * (q + k)
    return saved + _math_attention(load)


def products_per_token(load: Load) -> int:
    """Return the bytes per token of a layer's matrix products and attention: selective keeps them.

    Queries, keys, values, attention with its log-sum-exp, its projection, and the three of the MLP.
    """
    s, lora = load.part, load.itemsize * load.lora * len(load.shape.linear_modules)
    outputs = 2 * s.queries + 2 * s.keys + 2 * s.hidden + 2 * s.intermediate
    adapters = sum(out for _, out in s.linear_modules) if load.lora else 0
    return load.itemsize * (outputs + adapters) + FLOAT32 * s.heads + lora


def _math_attention(load: Load) -> int:
    """Return the bytes per token that attention saves beside q, k, v and output.

    Only the flash kernels take grouped heads, and they take no float32. A GPU then multiplies
    whole matrices of scores [heads, line], and expands keys and values to all heads.
    """
    s = load.part
    if not load.cuda or load.bf16 or s.heads == s.kv_heads:
        return 0
    return FLOAT32 * (s.heads * load.line + 2 * s.queries)


def activations(load: Load) -> int:
    """Return the bytes that are saved for the backward pass at the end of the forward pass.

    Of a layer that recomputes its activations: its input, and if selective its matrix products.
    """
    s, policy = load.shape, load.checkpointing
    input_ = load.residual * s.hidden
    if policy == "selective":
        saved = s.layers * (input_ + products_per_token(load))
    else:
        recomputed = math.ceil(s.layers / int(policy)) if policy else 0
        saved = recomputed * input_ + (s.layers - recomputed) * saved_per_token(load)
    last = FLOAT32 * (s.hidden + 1) * (1 if load.lora else 2)  # the norm before the head
    return load.tokens * (saved + last)


def head(load: Load, *, learns: bool) -> int:
    """Return the bytes of the fused operator: a chunk of logits, weight copies, gradients."""
    s, c, bf16 = load.shape, load.itemsize, load.bf16
    size, least = _CHUNKS["cuda" if load.cuda else "cpu"]
    rows = min(max(least, size // (FLOAT32 * s.vocabulary)), load.tokens)
    found = rows * s.vocabulary * FLOAT32
    if bf16 and (learns or not load.cuda):
        # A GPU's gradient of the logits; a CPU's product, before it becomes float32.
        found += rows * s.vocabulary * BFLOAT16
    if bf16 and (not load.lora or load.train_head):
        found += BFLOAT16 * s.table_weights
    if learns and load.trains_head:
        found += FLOAT32 * s.table_weights
        if bf16 and not load.cuda:
            found += BFLOAT16 * s.table_weights  # one chunk's product
    states = FLOAT32 + (BFLOAT16 if bf16 else 0) + (c if learns else 0)
    return found + load.tokens * s.hidden * states


def learning(load: Load) -> dict[str, int]:
    """Return the bytes that an update needs beside `held`, at the peak of its micro-batches."""
    s, c = load.part, load.itemsize
    whole, load = load.tokens, replace(load, tokens=-(-load.tokens // load.context_parallel))
    found = {"gradients": _gradients(load)}
    if load.sharded:
        found |= gathered_by_layer(load)
        # FSDP2 casts a layer's gradient.
        found["gathered gradients"] = (c + FLOAT32) * load.trained_layer
        found["gathered gradients"] += FLOAT32 * load.trained_root
    elif load.bf16:
        linear = load.trained_layer if load.lora else s.linear_weights
        found["bfloat16 weights"] = BFLOAT16 * s.layers * linear
    found["activations"] = activations(load)
    at_loss = head(load, learns=True)
    # The backward pass of the MLP: two more tensors of its width, and the residual's gradient.
    backward = load.tokens * (2 * c * s.intermediate + load.residual * s.hidden)
    backward += 3 * _math_attention(load) * load.tokens
    if load.checkpointing:  # the input of the layer is saved already
        backward += load.tokens * (saved_per_token(load) - load.residual * s.hidden)
    if load.checkpointing == "selective":
        backward -= load.tokens * products_per_token(load)
    if load.checkpointing is True:
        backward -= found.get("bfloat16 weights", 0) * (s.layers - 1) // s.layers
    at_peak = {"one layer": backward, "logits": at_loss}
    if load.context_parallel > 1:  # of all tokens, until the end of the forward pass
        at_peak["embeddings"] = load.residual * s.hidden * whole
    widest = max(at_peak, key=at_peak.__getitem__)
    found[widest] = at_peak[widest]
    return found


def optimizer(load: Load) -> dict[str, int]:
    """Return the bytes that AdamW's step needs beside `held`.

    Moments in 8 bits are updated in float32, those of one weight at a time.
    """
    if load.cpu_offload:
        return {}
    found = {"gradients": FLOAT32 * load.trained // load.shards}
    if load.narrow_moments:
        largest = max(rows * length for rows, length in load.trained_matrices)
        found["temporary"] = 2 * FLOAT32 * largest // load.shards
    return found


def gathered_by_layer(load: Load) -> dict[str, int]:
    """Return the bytes of the weights that FSDP2 gathers at a time for a pass."""
    s, c = load.part, load.itemsize
    wide = c if load.lora else FLOAT32
    layer = c * s.linear_weights + wide * s.other_weights
    layer += c * load.trained_layer if load.lora else 0
    # A layer is gathered before the one before it is freed.
    return {"gathered weights": min(2, s.layers) * layer + wide * s.root_weights}


def gathered(load: Load) -> dict[str, int]:
    """Return the bytes of the full weights of one process, for sampling."""
    s, c = load.shape, load.itemsize
    linear = s.layers * s.linear_weights
    if load.sharded:
        adapters = s.layers * load.trained_layer if load.lora else 0
        others = load.shape.weights - linear
        wide = c if load.lora else FLOAT32
        return {"gathered weights": c * (linear + adapters) + wide * others}
    return {"bfloat16 weights": BFLOAT16 * linear} if load.bf16 and not load.lora else {}


def _without_gradient(load: Load, tokens: int) -> int:
    """Return the bytes of one layer's forward pass over `tokens` tokens: those of its MLP.

    Gate, up and their product; the residual, and two tensors of its norm, which is float32.
    Adapters have an output besides, and read a float32 copy of a bfloat16 input.
    """
    s, c = load.part, load.itemsize
    width, inputs = 3 * c * s.intermediate, load.residual + 2 * FLOAT32
    if load.lora:
        width += c * s.intermediate
        inputs += FLOAT32 * load.bf16
    return tokens * (width + inputs * s.hidden)


def sampling(load: Load) -> dict[str, int]:
    """Return the bytes that sampling needs beside `held`; {} if the job samples nothing.

    A rollout engine that sleeps while the trainer learns needs its bytes here and in `scoring`.
    """
    if awake := _awake(load):
        return awake
    if not load.sampled:
        return {}
    s, tokens = load.shape, load.sampled * load.sampled_line
    cache = 2 * load.itemsize * s.keys * tokens
    found = gathered(load) | {"key-value cache": cache * s.layers}
    table = BFLOAT16 * s.table_weights if load.bf16 and not load.lora else 0
    logits = load.sampled * s.vocabulary * _SAMPLING_BYTES + table
    found["logits"] = logits
    alone = replace(load, tensor_parallel=1)
    read = _without_gradient(alone, load.sampled * load.sampled_prompt)
    found["one layer"] = max(cache // 2, read)  # one layer at a time is extended by a copy
    return found


def _awake(load: Load) -> dict[str, int]:
    """Return the bytes of a rollout engine that sleeps at other times; {} if there is none."""
    return {"rollout engine": load.engine} if load.engine and load.engine_sleeps else {}


def scoring(load: Load) -> dict[str, int]:
    """Return the bytes of a forward pass over a micro-batch: rows of the anchor, an evaluation."""
    load = replace(load, tokens=-(-load.tokens // load.context_parallel))
    one = _without_gradient(load, load.tokens) + _math_attention(load) * load.tokens
    weights = gathered_by_layer(load) if load.sharded else gathered(load)
    found = weights | {"one layer": one, "logits": head(load, learns=False)} | _awake(load)
    if load.critic_tokens:  # float32, and a copy of those with a known reward
        found["states for the critic"] = 2 * FLOAT32 * load.shape.hidden * load.critic_tokens
    return found


def stages(load: Load) -> dict[str, dict[str, int]]:
    """Return the bytes of each stage by part, beside `held`. Stages that do not happen are {}."""
    return {
        "sampling": sampling(load),
        "scoring": scoring(load),
        "learning": learning(load),
        "optimizer": optimizer(load),
    }


def peak(load: Load) -> int:
    """Return the most bytes that a process needs at a time."""
    return sum(held(load).values()) + max(sum(part.values()) for part in stages(load).values())
