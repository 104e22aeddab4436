"""Sequences packed in one line are independent; models that mix them are detected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from clients.config.tables.common import StudentConfig
from student_trainer.data.batch import ScoredSequence, make_batch
from student_trainer.data.packing import Layout, micro_batches
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.attention import choose_attention
from student_trainer.model.probes import separates_packed_sequences
from student_trainer.model.student import Student
from student_trainer.objectives.distillation import DistillationObjective, distillation_loss
from tests.student_trainer import tiny
from tests.student_trainer.small_store import Text, block_of

CPU = torch.device("cpu")
OBJECTIVE = DistillationObjective("forward", "bucket+teacher_samples", 1.3, cross_entropy=0.3)
VOCABULARY = len(tiny.ALPHABET) + 1


def qwen(attention: str = "sdpa") -> Any:
    model = tiny.model(seed=3, layers=2)
    model.set_attn_implementation(attention)
    return model


def gpt2() -> Any:
    """A model with absolute position embeddings."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, initializer_range=0.3,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def gemma2() -> Any:
    """A model with a sliding window of three tokens and a head that is not linear."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, sliding_window=3,
            pad_token_id=0, eos_token_id=0, bos_token_id=None, attn_implementation="eager",
            initializer_range=0.3,
        )
    )  # fmt: skip


def bloom() -> Any:
    """A model that takes no position ids."""
    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2, pad_token_id=0)
    )


def mamba() -> Any:
    """A model whose recurrent state continues from one sequence into the next."""
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, pad_token_id=0)
    )


def random_items(lengths: list[int], *, seed: int = 0) -> list[ScoredSequence]:
    """Random tokens of these lengths, with rows of a teacher."""
    rng = np.random.default_rng(seed)
    teacher = tiny.model(seed=9)
    items = []
    for length in lengths:
        text: Text = (rng.integers(0, VOCABULARY, length).tolist(), int(rng.integers(1, length)))
        block = block_of(teacher, text, top_k=3, samples=2, temperature=OBJECTIVE.temperature)
        items.append(ScoredSequence(TokenSequence(torch.tensor(text[0]), text[1]), block))
    return items


def losses_and_gradients(
    student: Student, groups: list[list[ScoredSequence]], layout: Layout
) -> Any:
    """Return the losses of tokens by sequence, and the gradients of their sum."""
    student.zero_grad()
    losses: dict[int, Tensor] = {}
    for group in groups:
        batch = make_batch(group, CPU, layout)
        loss = distillation_loss(batch, OBJECTIVE)
        out = student(batch, loss, OBJECTIVE.temperature)
        out.loss_sum.backward()
        for number, item in enumerate(group):
            losses[id(item)] = out.metrics["loss"][batch.sequence == number]
    grads = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    return losses, grads


@pytest.mark.parametrize(
    "make", [qwen, lambda: qwen("eager"), gpt2, gemma2], ids=["sdpa", "eager", "gpt2", "gemma2"]
)
def test_packed_is_alone(make: Any) -> None:
    model = make()
    student = Student(model)
    choose_attention(student, student, StudentConfig(model="-"))
    assert student.layout == "lines"
    items = random_items([9, 2, 5, 3, 3, 7, 2, 4, 6, 2])
    groups = micro_batches(items, 18, "lines")
    assert any(make_batch(group, CPU, "lines").position_ids is not None for group in groups)
    packed_losses, packed_grads = losses_and_gradients(student, groups, "lines")
    padded_losses, padded_grads = losses_and_gradients(
        student, [[item] for item in items], "padded"
    )
    assert packed_losses.keys() == padded_losses.keys()
    for name, losses in padded_losses.items():
        torch.testing.assert_close(packed_losses[name], losses, rtol=1e-5, atol=1e-5)
    for name, grad in padded_grads.items():
        assert float((packed_grads[name] - grad).norm() / grad.norm()) < 1e-5, name


@pytest.mark.parametrize("make", [bloom, mamba])
def test_what_does_not_keep_sequences_apart_is_padded(make: Any) -> None:
    student = Student(make())
    assert not separates_packed_sequences(student)
    choose_attention(student, student, StudentConfig(model="-"))
    assert student.layout == "padded"


def test_a_model_that_ignores_positions_is_found_out() -> None:
    """A model that accepts position ids, but attends across sequences."""
    model = qwen()
    inner = model.model.forward
    model.model.forward = lambda position_ids=None, **inputs: inner(**inputs)
    assert not separates_packed_sequences(Student(model))


@pytest.mark.parametrize("max_tokens", [1, 30, 64, 10_000])
def test_lines_are_full_and_no_longer_than_the_longest(max_tokens: int) -> None:
    rng = np.random.default_rng(1)
    items = random_items([int(n) for n in rng.integers(2, 30, 60)])
    groups = micro_batches(items, max_tokens, "lines")
    flat = [id(item) for group in groups for item in group]
    assert sorted(flat) == sorted(id(item) for item in items), "each one once"
    tokens = sum(len(item.sequence.token_ids) for item in items)
    area = 0
    for group in groups:
        batch = make_batch(group, CPU, "lines")
        lengths = [len(item.sequence.token_ids) for item in group]
        assert batch.input_ids.shape[1] == max(lengths)
        assert len(group) == 1 or batch.input_ids.numel() <= max(max_tokens, max(lengths))
        area += batch.input_ids.numel()
        for number, item in enumerate(group):
            rows_of_item = batch.sequence == number
            targets = batch.input_ids[batch.line[rows_of_item], batch.position[rows_of_item]]
            assert targets.tolist() == item.sequence.completion.tolist()
    padded_area = sum(
        make_batch(group, CPU).input_ids.numel() for group in micro_batches(items, max_tokens)
    )
    assert tokens <= area <= padded_area
    if max_tokens == 10_000:
        assert area < 1.1 * tokens < padded_area
