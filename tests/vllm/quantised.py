"""Tiny models quantised in the formats that people publish, and the same weights in float32.

Each format is written down here from its definition; no library that quantises is used. Shapes: a
weight is [out, in], as in a linear layer of torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.teacher_service.tiny_model import save_tokenizer

VOCAB_SIZE = 500
GROUP = 32  # inputs that share a scale, in 4 bits
BLOCK = 128  # rows and columns that share a scale, in FP8
_LARGEST_FP8 = 448.0
# Nibble i of an AWQ word has output _AWQ_ORDER[i] of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WIDTH = 128

# Tensors of one layer by the last part of their names, and the weight that they mean.
Quantised = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """How linear layers are stored, the `quantization_config` that says so, and the dtype.

    rounded: how a layer rounds the states that it multiplies; None if it does not.
    """

    quantise: Callable[[Tensor], Quantised]
    config: dict[str, Any]
    dtype: str
    rounded: Callable[[Tensor], Tensor] | None = None


def _groups(weight: Tensor) -> Tensor:
    """float32 [out, groups, GROUP]"""
    return weight.reshape(len(weight), -1, GROUP)


def _packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [..., n / 8]: eight numbers from 0 to 15 a word, number order[i] in nibble i."""
    eights = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, 8)
    words = sum(eights[..., number] << (4 * nibble) for nibble, number in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq(weight: Tensor) -> Quantised:
    """AWQ (gemm): 4 bits with a zero of each group; transposed, outputs packed."""
    groups = _groups(weight)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()  # [out, groups]
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    exact = (numbers - zeros[..., None]) * scales[..., None]
    stored = {
        "qweight": _packed(numbers.reshape(weight.shape).T.contiguous(), _AWQ_ORDER),
        "qzeros": _packed(zeros.T.contiguous(), _AWQ_ORDER),
        "scales": scales.T.contiguous().half(),
    }
    return stored, exact.reshape(weight.shape)


def gptq(weight: Tensor) -> Quantised:
    """GPTQ: 4 bits around 8; transposed, inputs packed; the stored zeros are one less."""
    numbers, scales = _symmetric(weight)
    stored = {
        "qweight": _packed(numbers.reshape(weight.shape)).T.contiguous(),
        "qzeros": _packed(torch.full_like(scales.T, 7).contiguous()),
        "scales": scales.T.contiguous().half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return stored, ((numbers - 8) * scales[..., None]).reshape(weight.shape)


def packed_int4(weight: Tensor) -> Quantised:
    """compressed-tensors W4A16: 4 bits around 8, inputs packed."""
    numbers, scales = _symmetric(weight)
    stored = {
        "weight_packed": _packed(numbers.reshape(weight.shape)),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, ((numbers - 8) * scales[..., None]).reshape(weight.shape)


def _symmetric(weight: Tensor) -> Quantised:
    groups = _groups(weight)
    scales = (groups.abs().amax(2) / 7).half().float()
    return ((groups / scales[..., None]).round() + 8).clamp(0, 15), scales  # type: ignore[return-value]


def int8_rows(weight: Tensor) -> Quantised:
    """compressed-tensors, 8 bits: a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().clamp(-127, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def fp8_rows(weight: Tensor) -> Quantised:
    """compressed-tensors, FP8: a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / _LARGEST_FP8
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def fp8_tensor(weight: Tensor) -> Quantised:
    """FP8 with one scale."""
    scale = weight.abs().amax() / _LARGEST_FP8
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale.reshape(1)}, numbers.float() * scale


def fp8_blocks(weight: Tensor) -> Quantised:
    """FP8 as DeepSeek and Qwen publish it: a factor for each block of 128 by 128."""
    blocks = [-(-size // BLOCK) for size in weight.shape]
    factors = torch.empty(*blocks)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    exact = torch.empty(weight.shape)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            at = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            factor = factors[row, column] = weight[at].abs().amax() / _LARGEST_FP8
            numbers[at] = (weight[at] / factor).to(torch.float8_e4m3fn)
            exact[at] = numbers[at].float() * factor
    return {"weight": numbers, "weight_scale_inv": factors}, exact


def to_int8(states: Tensor) -> Tensor:
    """Round each state [..., H] to 255 steps of its largest value."""
    scale = (states.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-10)
    return (states / scale).round() * scale


def to_fp8(states: Tensor) -> Tensor:
    """Round each state [..., H] to FP8, times a scale of its own."""
    scale = (states.abs().amax(-1, keepdim=True) / _LARGEST_FP8).clamp(min=1e-10)
    return (states / scale).to(torch.float8_e4m3fn).to(states.dtype) * scale


def _compressed(form: str, weights: dict[str, Any], states: object = None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": states}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _scheme(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **more,
    }


_INT8_STATES = _scheme(8, "int", "token", dynamic=True)
_FP8_STATES = _scheme(8, "float", "token", dynamic=True)
FORMATS = {
    "AWQ": Format(
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        "float16",
    ),
    "GPTQ": Format(
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
        },
        "float16",
    ),
    "FP8, 128 x 128": Format(
        fp8_blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
        "bfloat16",
    ),
    "compressed-tensors W4A16": Format(
        packed_int4,
        _compressed("pack-quantized", _scheme(4, "int", "group", group_size=GROUP)),
        "float16",
    ),
    "compressed-tensors W8A8, int8": Format(
        int8_rows,
        _compressed("int-quantized", _scheme(8, "int", "channel"), _INT8_STATES),
        "bfloat16",
        to_int8,
    ),
    "compressed-tensors W8A8, FP8": Format(
        fp8_rows,
        _compressed("float-quantized", _scheme(8, "float", "channel"), _FP8_STATES),
        "bfloat16",
        to_fp8,
    ),
}
# Of a head alone: its layer is the only one that is quantised.
HEADS = {
    "rows, FP8": (fp8_rows, _scheme(8, "float", "channel"), _FP8_STATES),
    "one scale, FP8": (fp8_tensor, _scheme(8, "float", "tensor"), _FP8_STATES),
    "rows, int8": (int8_rows, _scheme(8, "int", "channel"), _INT8_STATES),
}


def save_plain(path: Path, *, experts: bool = False) -> Path:
    """Write a random Qwen3, or Qwen3-MoE, whose sizes all formats can divide."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if experts:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": _WIDTH}
        sizes |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
    kind = transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.35 if "embed" in name or "lm_head" in name else 0.08)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def is_of_body(name: str) -> bool:
    """True for the weight of a linear layer other than a router and the head."""
    return name.endswith("_proj.weight")


def save_quantised(
    plain: Path,
    to: Path,
    form: Format,
    chosen: Callable[[str], bool] = is_of_body,
) -> tuple[Path, Path]:
    """Write a model with its `chosen` weights quantised, and one with what they mean, in float32.

    Returns (quantised, exact).
    """
    quantised, exact = (shutil.copytree(plain, to / name) for name in ("quantised", "exact"))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    weights = load_file(plain / "model.safetensors")
    assert not any(".experts.gate_up_proj" in name for name in weights), "one matrix an expert"
    for name, value in weights.items():
        if not chosen(name):
            stored[name] = meant[name] = value
            continue
        tensors, meant[name] = form.quantise(value.float())
        layer = name.removesuffix("weight")
        stored |= {layer + last: tensor.contiguous() for last, tensor in tensors.items()}
        assert not torch.allclose(meant[name], value, atol=1e-4)
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, exact / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    quantisation_config = dict(form.config)
    if "modules_to_not_convert" in quantisation_config:
        routers = [name.removesuffix(".weight") for name in weights if ".mlp.gate." in name]
        quantisation_config["modules_to_not_convert"] = [
            *quantisation_config["modules_to_not_convert"],
            *routers,
        ]
    config |= {"quantization_config": quantisation_config, "dtype": form.dtype}
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, exact


def head_format(name: str) -> Format:
    """A format of the head alone, in float32, so that nothing else is rounded."""
    quantise, scheme, states = HEADS[name]
    form = "float-quantized" if scheme["type"] == "float" else "int-quantized"
    config = _compressed(form, scheme, states)
    config["config_groups"]["group_0"]["targets"] = ["re:.*lm_head"]
    config["ignore"] = ["re:model.*"]
    return Format(quantise, config, "float32")


def round_states(model: Any, form: Format) -> Any:
    """Make the quantised layers of a model of transformers round their inputs as `form` says."""
    rounded = form.rounded
    if rounded is not None:
        for name, module in model.named_modules():
            if is_of_body(name + ".weight"):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model
