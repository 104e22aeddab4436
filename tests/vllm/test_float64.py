"""Rows of models with a scaled or capped head, and with experts, on a real vLLM against float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from protos.rows.codec import RowBlock
from teacher_service.engines.vllm import VllmEngine
from tests.teacher_service.tiny_model import save_tokenizer
from tests.vllm.float64 import Exact, queries
from tests.vllm.model import MAX_LENGTH, VOCAB_SIZE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None},
    "GraniteConfig": {"logits_scaling": 8.0, "tie_word_embeddings": True},
    "CohereConfig": {"logit_scale": 0.0625},
    "Qwen3MoeConfig": EXPERTS,
}


def save(path: Path, name: str) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.5)
        if not config.tie_word_embeddings:
            model.lm_head.weight.normal_(std=0.5)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("name", "processes"),
    [*((name, 1) for name in MODELS), ("Gemma2Config", 2), ("Qwen3MoeConfig", 2)],
)
def test_rows(name: str, processes: int, tmp_path: Path) -> None:
    """In one process, and with each layer divided between two."""
    path = save(tmp_path, name)
    exact = Exact(path)
    engine = VllmEngine(str(path), max_batch_tokens=256, tensor_parallel_size=processes)
    try:
        score_queries = queries(VOCAB_SIZE)
        for query, rows in zip(score_queries, engine.score(score_queries), strict=True):
            assert isinstance(rows, RowBlock), rows
            assert exact.differences(query, rows).largest < 1e-4
            exact.assert_likeliest(query, rows, within=1e-4)
    finally:
        engine.close()
