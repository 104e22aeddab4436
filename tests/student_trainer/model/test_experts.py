"""A mixture of experts sharded over processes learns as in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.parallel.shards import full_tensor, local
from tests.forks import Forks
from tests.student_trainer.teachers.anchors import rollouts, spread_student

EXPERTS, WORLD = 5, 2  # experts that the processes cannot share evenly


def make_experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        tie_word_embeddings=True,
    )
    return Qwen3MoeForCausalLM(config)


def learn_updates(out: Path, sharding: str, bf16: bool) -> None:
    """Make two updates on six answers in two micro-batches; save weights and shard shapes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    student = spread_student(make_experts(), sharding, bf16=bf16)
    optimizer = torch.optim.SGD(student.trained.parameters(), lr=0.1)
    own_sequences = [
        ScoredSequence(rollout, placeholder_rows(rollout.head_ids.int().numpy()))
        for rollout in rollouts(6)[rank::world]
    ]
    halves = [own_sequences[: len(own_sequences) // 2], own_sequences[len(own_sequences) // 2 :]]
    for _ in range(2):
        for number, half in enumerate(halves):
            with student.synchronized(is_last=number == 1):
                batch = make_batch(half, student.device)
                loss = student(batch, lambda rows, index: -rows.token_logprobs, 1.0).loss_sum
                (world * loss / 18).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(student.trained.model.named_parameters())
    shares = {name: tuple(local(p).shape) for name, p in parameters.items() if ".experts." in name}
    weights = {name: full_tensor(p.detach()) for name, p in parameters.items()}
    torch.save({"weights": weights, "shares": shares}, out / f"{sharding}-{rank}.pt")


@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_experts_learn_as_in_one_process(bf16: bool, tmp_path: Path) -> None:
    for world, sharding in ((1, "none"), (WORLD, "fsdp2")):
        forks = Forks(
            world, tmp_path / f"{sharding}.group", learn_updates, tmp_path, sharding, bf16
        )
        assert forks.wait() == [0] * world
    expected_weights = torch.load(tmp_path / "none-0.pt")["weights"]
    weights_before = dict(make_experts().named_parameters())
    expert_counts = []
    for rank in range(WORLD):
        saved = torch.load(tmp_path / f"fsdp2-{rank}.pt")
        expert_counts.append({shape[0] for shape in saved["shares"].values()})
        for name, weight in expected_weights.items():
            distance = (weight - weights_before[name]).norm()
            assert distance > 0, name
            assert (saved["weights"][name] - weight).norm() <= (2e-2 if bf16 else 1e-4) * distance
    assert expert_counts == [{3}, {2}], "each process has whole experts, and only its own"
