"""Counted operations of a forward and backward pass, compared with the formula of MFU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from clients.config.tables.common import StudentConfig
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import Rollout
from student_trainer.loop.efficiency import LearningFlops
from student_trainer.model.lora import add_adapters
from student_trainer.model.student import Student

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TOKENS, START, LINES = 192, 64, 2


def batch() -> Batch:
    learned_tokens = TOKENS - START
    head = torch.zeros(learned_tokens, 1, dtype=torch.long)
    rollout = Rollout(torch.arange(TOKENS), START, head, torch.zeros(learned_tokens), False, "")
    rows = placeholder_rows(head.int().numpy())
    return make_batch([ScoredSequence(rollout, rows)] * LINES, torch.device("cpu"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_formula_counts_what_a_pass_does(kind: str, lora: bool, tied: bool) -> None:
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    if lora:
        add_adapters(model, StudentConfig.model_validate({"model": "tiny", "lora": {"rank": 8}}))
    # bfloat16, as the counter knows all its matrix products on a CPU.
    student = Student(model, bf16=True)
    flops = LearningFlops(student)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = student(batch(), lambda rows, index: -rows.token_logprobs, 1.0)
        out.loss_sum.backward()
    expected = LINES * flops.count_sequence(TOKENS, TOKENS - START)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)
