"""The head found without weights: where it is in the files, and how it makes logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma2 import modeling_gemma2

from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from teacher_service.head.linear_head import HeadTensors, find_head
from teacher_service.head.scale_and_cap import ScaleAndCap
from teacher_service.head.stored_head import StoredWeight
from teacher_service.models.loading import load_model
from tests.teacher_service.tiny_model import VOCAB_SIZE, save_tiny_model, save_tokenizer

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def head_of(path: Path) -> HeadTensors:
    return find_head(load_model(path, dtype="auto", device="meta"), path)


def save(path: Path, config: str, **values: Any) -> Path:
    sizes = getattr(transformers, config)(**{**SIZES, **values})
    transformers.AutoModelForCausalLM.from_config(sizes).save_pretrained(path)
    return path


def test_a_head_of_its_own(tiny_model: Path) -> None:
    assert head_of(tiny_model) == HeadTensors(StoredWeight("lm_head.weight"), None, VOCAB_SIZE)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, tied=True)
    assert head_of(path) == HeadTensors(StoredWeight("model.embed_tokens.weight"), None, VOCAB_SIZE)


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    path = save(tmp_path, "PhiConfig", num_key_value_heads=4)
    assert head_of(path) == HeadTensors(StoredWeight("lm_head.weight"), "lm_head.bias", VOCAB_SIZE)


def test_a_body_that_returns_more_than_states(tmp_path: Path) -> None:
    path = save(tmp_path, "MixtralConfig", num_local_experts=2)
    assert head_of(path) == HeadTensors(StoredWeight("lm_head.weight"), None, VOCAB_SIZE)


HEADS = {
    "GraniteConfig": ({"logits_scaling": 8.0}, ScaleAndCap(0.125)),
    "CohereConfig": (
        {"logit_scale": 0.0625, "eos_token_id": 1, "bos_token_id": 2},
        ScaleAndCap(0.0625),
    ),
    "Gemma2Config": ({"final_logit_softcapping": 30.0}, ScaleAndCap(cap=30.0)),
    "Gemma3TextConfig": ({"final_logit_softcapping": 20.0}, ScaleAndCap(cap=20.0)),
    "NanoChatConfig": ({}, ScaleAndCap(cap=15.0)),
}


@pytest.mark.parametrize("config", HEADS)
def test_logits_that_are_scaled_or_capped(tmp_path: Path, config: str) -> None:
    """Found by the probe, without weights and with them; the rows are those of the model."""
    values, expected = HEADS[config]
    path = save(tmp_path, config, **values)
    save_tokenizer(path)
    scale_and_cap = head_of(path).scale_and_cap
    assert (scale_and_cap.scale, scale_and_cap.cap) == (
        pytest.approx(expected.scale, rel=1e-6),
        expected.cap,
    )
    engine = HfEngine(str(path), device="cpu")
    tokens = np.arange(12, dtype=np.int32) * 7 % VOCAB_SIZE
    for temperature in (1.0, 0.6):
        (rows,) = engine.score([ScoreQuery(tokens, 1, top_k=VOCAB_SIZE, temperature=temperature)])
        assert isinstance(rows, RowBlock)
        with torch.no_grad():
            logits = engine._model(input_ids=torch.from_numpy(tokens).long()[None, :-1]).logits[0]
        exact = (logits.double() / temperature).log_softmax(1)
        expected_logprobs = exact.gather(1, torch.from_numpy(rows.head_ids).long()).numpy()
        np.testing.assert_allclose(rows.head_logprobs, expected_logprobs, rtol=1e-6, atol=2e-6)


def test_logits_that_are_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: a cap that is no tanh."""
    path = save(tmp_path, "Gemma2Config", final_logit_softcapping=30.0)
    monkeypatch.setattr(modeling_gemma2.torch, "tanh", lambda x: x / (1 + x.abs()))
    with pytest.raises(InvalidInput, match="not one linear layer") as caught:
        head_of(path)
    assert caught.value.field == "--model"


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="transformers has no Dory")
def test_a_head_with_a_factor_for_each_id(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not one linear layer"):
        head_of(save(tmp_path, "DoryConfig"))


def test_a_cap_that_is_off_is_no_cap(tmp_path: Path) -> None:
    path = save(tmp_path, "Gemma2Config", final_logit_softcapping=None)
    assert head_of(path).vocab_size == VOCAB_SIZE


def test_a_head_under_another_name(tmp_path: Path) -> None:
    """transformers would find it by its own renaming; we load it by its name alone."""
    path = save_tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    model = load_model(path, dtype="auto", device="meta")
    weights["head.weight"] = weights.pop("lm_head.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"no tensor lm_head\.weight"):
        find_head(model, path)
