"""Students of several architectures, and updates by one process or a mesh of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.loop.optimizer import clip_gradients
from student_trainer.losses import Rows
from student_trainer.model.loading import recompute_activations
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import (
    full_tensor,
    full_tensors,
    local,
    own_slices,
    tensor_with_shard,
)
from student_trainer.teachers.anchor import Anchor
from tests.forks import Forks
from tests.student_trainer.teachers.anchors import rollouts, spread_student

# Grouped heads; 45 MLP units for each process of a group, which FSDP2 cannot share evenly.
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 32,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Architecture -> settings: biases, norms of heads, windows, tied weights, gelu.
STUDENTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "smollm3": {},
    "granite": {},
    "starcoder2": {},
    "phi": {},
    "gpt_neox": {"num_key_value_heads": 4},
}
UPDATES = 2
MAX_GRADIENT_NORM = 0.5  # of the gradient's norm: every update is clipped


def make(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **{**SIZES, **STUDENTS.get(name, {}), **(changes or {})})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def batch(rank: int, world: int) -> Batch:
    """The rollouts of a process; the last processes have fewer tokens."""
    own_rollouts = rollouts()[rank::world]
    sequences = [
        ScoredSequence(rollout, placeholder_rows(rollout.head_ids.numpy().astype(np.int32)))
        for rollout in own_rollouts
    ]
    return make_batch(sequences, torch.device("cpu"))


def loss(rows: Rows, _: slice) -> Tensor:
    """Return a loss that depends on head, tail and token."""
    head = rows.head_logprobs
    return (head.exp() * head).sum(1) + rows.tail_logmass.exp() - rows.token_logprobs


def learn(
    student: Replicated | Sharded, rank: int, world: int, policy: bool | int | str = False
) -> tuple[list[float], dict[str, Tensor], float]:
    """Make the updates in float64. Returns the norms, the weights, and the anchor's gap."""
    student.trained.double()
    student.trained.train()
    recompute_activations(student.trained.model, policy)
    # With a usual eps, rounding errors of gradients near 0 would become updates.
    optimizer = torch.optim.AdamW(student.trained.parameters(), lr=0.05, eps=1e-3)
    anchor = Anchor(student, tau=0.9, update_period=1)
    norms = []
    for _ in range(UPDATES):
        batches_of_group = student.batches_of_group(batch(rank, world))
        assert [is_own for _, is_own in batches_of_group].count(True) == 1
        for process_batch, _ in batches_of_group:
            out = student(process_batch, loss, 1.3)
            (out.loss_sum * student.gradient_ranks).backward()
        norms.append(float(clip_gradients(student, MAX_GRADIENT_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        anchor.after_update()
    weights = dict(student.trained.model.named_parameters())
    assert anchor.elements == sum(weight.numel() for weight in weights.values())
    return norms, full_tensors(weights, keep=True), anchor.gap()


def check_shards(student: Sharded) -> None:
    """Check that shards are at `own_slices`, and that all shards form the model."""
    for name, weight in student.trained.model.named_parameters():
        full_weight = full_tensor(weight.detach())
        shard = local(weight.detach())
        assert torch.equal(full_weight[own_slices(weight)], shard), name
        rebuilt = tensor_with_shard(shard, weight)
        assert rebuilt.placements == weight.placements, name  # type: ignore[attr-defined]
        assert torch.equal(full_tensor(rebuilt), full_weight), name
    with student.gathered():
        gathered = {name: weight.clone() for name, weight in student.full.named_parameters()}
    for name, weight in student.trained.named_parameters():
        assert torch.equal(gathered[name], full_tensor(weight.detach())), name


def learn_in_process(
    out: Path, size: int, policy: bool | int | str, names: tuple[str, ...]
) -> None:
    """Train each student as one process of a mesh with groups of `size`, and save the weights."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in names:
        student = spread_student(make(name), "fsdp2", size)
        assert isinstance(student, Sharded)
        check_shards(student)
        norms, weights, gap = learn(student, rank, world, policy)
        held_elements = sum(local(weight).numel() for weight in student.trained.parameters())
        numbers = torch.tensor([*norms, gap, held_elements], dtype=torch.float64)
        save_file(weights | {"numbers": numbers}, out / f"{name}-{rank}.safetensors")


def run_processes(
    world: int, size: int, out: Path, names: tuple[str, ...], policy: bool | int | str = False
) -> None:
    """Run `learn_in_process` in `world` processes."""
    assert (
        Forks(world, out / "group", learn_in_process, out, size, policy, names).wait(240)
        == [0] * world
    )
