"""A quantised head in the files: read with its scales, or refused, and never read without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protos.errors import InvalidInput, WrongState
from teacher_service.engines.hf import HfEngine
from teacher_service.head.linear_head import find_head
from teacher_service.head.stored_head import StoredWeight, dequantise, read_weight
from teacher_service.models.loading import load_skeleton
from tests.teacher_service.tiny_model import VOCAB_SIZE, save_tiny_model

COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [40, 20]}
FP8 = torch.float8_e4m3fn


def stored(path: Path, tensors: dict[str, Tensor], quantisation: dict[str, Any] | None) -> Path:
    """A tiny model whose head has these tensors; a name is the part after "lm_head."."""
    save_tiny_model(path)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    weights |= {f"lm_head.{name}": tensor for name, tensor in tensors.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (path / "config.json").write_text(json.dumps(config))
    return path


def numbers(dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(VOCAB_SIZE, 32, generator=random) * 20).clamp(-120, 120).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "name", "scales", "quantisation"),
    [
        (FP8, "weight_scale", torch.tensor(0.25), COMPRESSED),
        (FP8, "weight_scale", torch.rand(VOCAB_SIZE, 1), COMPRESSED),
        (torch.int8, "weight_scale", torch.rand(VOCAB_SIZE, 1).bfloat16(), COMPRESSED),
        (torch.float8_e5m2, "weight_scale", torch.rand(VOCAB_SIZE), {"quant_method": "modelopt"}),
        (FP8, "weight_scale_inv", torch.rand(3, 2), BLOCKS),
    ],
)
def test_values_times_scales(
    dtype: torch.dtype, name: str, scales: Tensor, quantisation: dict[str, Any], tmp_path: Path
) -> None:
    """One scale, one a row, one a block of 40 rows and 20 columns, which 96 by 32 do not fill."""
    values = numbers(dtype)
    path = stored(tmp_path, {"weight": values, name: scales}, quantisation)
    head_tensors = find_head(load_skeleton(path, dtype="auto"), path)
    assert head_tensors.weight == StoredWeight("lm_head.weight", f"lm_head.{name}")
    assert head_tensors.vocab_size == VOCAB_SIZE
    expected = values.double().numpy().copy()
    factors = scales.double().numpy()
    for row in range(VOCAB_SIZE):
        for column in range(32):
            if factors.size == 1:
                expected[row, column] *= factors.item()
            elif factors.shape == (3, 2):
                expected[row, column] *= factors[row // 40, column // 20]
            else:
                expected[row, column] *= factors.reshape(-1)[row]
    np.testing.assert_allclose(read_weight(path, head_tensors.weight).numpy(), expected, rtol=1e-7)
    parts = [range(0, 64), range(64, 90), range(90, VOCAB_SIZE)]
    read = torch.cat([read_weight(path, head_tensors.weight, ids) for ids in parts])
    np.testing.assert_allclose(read.numpy(), expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("tensors", "quantisation"),
    [
        # scales beside a plain weight: whether it was multiplied is not known
        ({"weight": numbers(torch.float32), "weight_scale": torch.ones(1)}, COMPRESSED),
        ({"weight": numbers(FP8), "weight_scale": torch.ones(1)}, None),
        ({"weight": numbers(FP8)}, COMPRESSED),
        ({"weight": numbers(torch.int8)}, None),
        ({"weight": numbers(FP8), "weight_scale": torch.ones(7, 3)}, COMPRESSED),
        ({"weight": numbers(FP8), "weight_scale": torch.ones(1)}, {"quant_method": "unheard_of"}),
        ({"weight": numbers(torch.int8), "SCB": torch.ones(96)}, {"quant_method": "bitsandbytes"}),
        (
            {
                "weight": numbers(torch.int8),
                "weight_scale": torch.ones(96, 1),
                "weight_zero_point": torch.ones(96, 1, dtype=torch.int8),
            },
            COMPRESSED,
        ),
        (
            {"qweight": torch.ones(4, 96, dtype=torch.int32), "scales": torch.ones(1, 96)},
            {"quant_method": "gptq", "lm_head": True},
        ),
    ],
)
def test_a_head_whose_values_are_not_known_is_refused(
    tensors: dict[str, Tensor], quantisation: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = stored(tmp_path, tensors, quantisation)
    with pytest.raises(InvalidInput, match=r"quantised|cannot load") as caught:
        find_head(load_skeleton(path, dtype="auto"), path)
    assert caught.value.field == "--model"
    with pytest.raises(InvalidInput, match=r"quantised|cannot load"):
        HfEngine(str(path), device="cpu")


def test_scales_of_another_shape() -> None:
    with pytest.raises(ValueError, match="scales of shape"):
        dequantise(torch.ones(8, 4), torch.ones(3, 2), None)


def quantised_layer(path: Path, quantisation: dict[str, Any] | None) -> Path:
    """A tiny model with one layer of its body in FP8 and a scale."""
    save_tiny_model(path)
    weights = load_file(path / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj.weight"
    weights[layer] = (weights[layer] * 64).to(FP8)
    weights[f"{layer}_scale"] = torch.tensor([1 / 64])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    if quantisation is not None:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = quantisation
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("quantisation", "problem"),
    [
        (None, r"up_proj\.weight of .* is F8_E4M3, and config.json declares no quantisation"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"up_proj\.weight_scale"),
    ],
)
def test_a_body_whose_scales_transformers_does_not_use(
    quantisation: dict[str, Any] | None, problem: str, tmp_path: Path
) -> None:
    """transformers only warns, and takes the values of the layer without their scale."""
    path = quantised_layer(tmp_path, quantisation)
    with pytest.raises(InvalidInput, match=problem) as caught:
        HfEngine(str(path), device="cpu")
    assert caught.value.field == "--model"


def test_the_weights_of_a_quantised_model_are_not_replaced(tmp_path: Path) -> None:
    engine = HfEngine(str(save_tiny_model(tmp_path)), device="cpu")
    assert engine.parameters()
    engine._model.hf_quantizer = object()
    with pytest.raises(WrongState, match="quantised model"):
        engine.parameters()
