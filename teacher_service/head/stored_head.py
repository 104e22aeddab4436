"""The head's weight in the files of a model: finding it by name, reading, dequantising.

Shapes: H hidden size, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from clients.data.models.files import quantisation_of
from protos.errors import InvalidInput
from teacher_service.models.files import block_of, weight_files
from teacher_service.models.loading import build_load_error

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
# The methods below store values of these dtypes; values times scales are the weight.
_SCALED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # a factor in both cases
_SCALE_DTYPES = (*_PLAIN_DTYPES, "F8_E8M0")
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt")
_ACTIVATION_SCALE = "input_scale"  # rounds the head's inputs, and does not change its weight


@dataclass(frozen=True)
class StoredWeight:
    """Names of the tensors of the head's weight: its values, and its scales if it is quantised."""

    weight: str
    scales: str | None = None


@dataclass(frozen=True)
class _TensorInfo:
    dtype: str
    shape: tuple[int, ...]


def find_weight(path: Path, names: Sequence[str]) -> StoredWeight:
    """Return the tensors of the head's weight: the first of `names` that the files contain.

    Raises InvalidInput if the files have none of the tensors, or if the weight is quantised in a
    way whose exact values are not known.
    """
    tensors = _list_layer_tensors(path, names)
    weight = next((name for name in names if name in tensors), None)
    if weight is None and tensors:
        raise _quantised_head_error(path, tensors, min(tensors))
    if weight is None:
        raise _missing_tensor_error(path, names)
    layer = weight.rpartition(".")[0] + "."
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(layer)}
    quantised_tensor = _find_quantised_tensor(tensors, weight)
    if quantised_tensor is None:
        return StoredWeight(weight)
    scales = [name for name in tensors if name.removeprefix(layer) in _SCALE_NAMES]
    expected_tensors = {weight, *scales, layer + "bias", layer + _ACTIVATION_SCALE}
    quantisation = quantisation_of(path, "--model") or {}
    is_supported = (
        quantisation.get("quant_method") in _METHODS
        and tensors[weight].dtype in _SCALED_DTYPES
        and len(scales) == 1
        and tensors[scales[0]].dtype in _SCALE_DTYPES
        and tensors.keys() <= expected_tensors
        and _classify_scales(
            tensors[weight].shape, tensors[scales[0]].shape, block_of(quantisation)
        )
    )
    if not is_supported:
        raise _quantised_head_error(path, tensors, quantised_tensor)
    return StoredWeight(weight, scales[0])


def find_bias(path: Path, names: Sequence[str]) -> str:
    """Return the first name in `names` that a tensor in the weight files has.

    Raises InvalidInput if the files have none of these tensors.
    """
    tensors = _list_layer_tensors(path, names)
    for name in names:
        if name in tensors:
            return name
    raise _missing_tensor_error(path, names)


def read_weight(path: Path, stored: StoredWeight, ids: range | None = None) -> Tensor:
    """Return rows of the head's weight, [n, H], on the CPU.

    `ids`: the ids of the rows; None: all rows. The rows have the stored dtype, or float32 if the
    stored weight is quantised. Other rows are read only if they share a block of scales with `ids`.
    """
    if stored.scales is None:
        return read_tensor(path, stored.weight, ids)
    scales = read_tensor(path, stored.scales)
    block = block_of(quantisation_of(path, "--model") or {})
    skipped_rows = 0
    if ids is not None:
        shape = _list_layer_tensors(path, [stored.weight])[stored.weight].shape
        match _classify_scales(shape, tuple(scales.shape), block):
            case "row":
                scales = scales[ids.start : ids.stop]
            case "block" if block:
                first_block = ids.start // block[0]
                scales = scales[first_block : math.ceil(ids.stop / block[0])]
                skipped_rows = ids.start - first_block * block[0]
                ids = range(first_block * block[0], ids.stop)
    return dequantise(read_tensor(path, stored.weight, ids), scales, block)[skipped_rows:]


def dequantise(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return values [V, H] times their scales, float32.

    `scales` has one number, one number per row ([V] or [V, 1]), or one number per `block` of rows
    and columns ([ceil(V / rows), ceil(H / columns)]). Raises ValueError for another shape.
    """
    weight, factors = values.to(torch.float32), scales.to(torch.float32)
    rows, columns = weight.shape
    scale_kind = _classify_scales((rows, columns), tuple(factors.shape), block)
    match scale_kind:
        case "tensor":
            return weight.mul_(factors.reshape(()))
        case "row":
            return weight.mul_(factors.reshape(rows, 1))
    if scale_kind != "block" or block is None:
        raise ValueError(f"scales of shape {tuple(factors.shape)} for {rows} x {columns} values")
    for block_row, block_factors in enumerate(factors):
        weight_block = weight[block_row * block[0] : (block_row + 1) * block[0]]
        weight_block.mul_(block_factors.repeat_interleave(block[1])[:columns])
    return weight


def require_plain_weight(path: Path, names: Sequence[str]) -> None:
    """Raise InvalidInput if the head's weight, stored under one of `names`, is quantised.

    Values without their scales are wrong, and the self-test would not notice, because it compares
    rows of the same engine.
    """
    tensors = _list_layer_tensors(path, names)
    for name in names:
        if (quantised_tensor := _find_quantised_tensor(tensors, name)) is not None:
            raise _quantised_head_error(path, tensors, quantised_tensor)


def read_tensor(path: Path, name: str, rows: range | None = None) -> Tensor:
    """Return `rows` of a tensor of the weight files (None: all rows), on the CPU.

    Raises KeyError if the files have no such tensor.
    """
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor: Tensor = (
                    tensors.get_tensor(name)
                    if rows is None
                    else tensors.get_slice(name)[rows.start : rows.stop]
                )
                return tensor
    raise KeyError(name)


def _list_layer_tensors(path: Path, names: Sequence[str]) -> dict[str, _TensorInfo]:
    """Return the tensors in the weight files that belong to the layers of `names`.

    `names` are names of parameters, such as "lm_head.weight", whose layer is "lm_head".
    """
    layers = tuple({name.rpartition(".")[0] + "." for name in names})
    tensor_infos: dict[str, _TensorInfo] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                if name.startswith(layers):
                    tensor: Any = tensors.get_slice(name)
                    tensor_infos[name] = _TensorInfo(tensor.get_dtype(), tuple(tensor.get_shape()))
    return tensor_infos


def _find_quantised_tensor(tensors: Mapping[str, _TensorInfo], weight: str) -> str | None:
    """Return the name of a tensor that shows that the layer of `weight` is quantised, or None."""
    layer = weight.rpartition(".")[0] + "."
    plain = (layer + "weight", layer + "bias")
    layer_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(layer)}
    for name, tensor in layer_tensors.items():
        if name not in plain or tensor.dtype not in _PLAIN_DTYPES:
            return name
    return None


def _classify_scales(
    weight: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> str:
    """Return the part of a weight that one scale covers: "tensor", "row", "block"; "": unknown."""
    if math.prod(scales) == 1:
        return "tensor"
    if scales in ((weight[0],), (weight[0], 1)):
        return "row"
    blocks = block and (math.ceil(weight[0] / block[0]), math.ceil(weight[1] / block[1]))
    return "block" if scales == blocks else ""


def _missing_tensor_error(path: Path, names: Sequence[str]) -> InvalidInput:
    return build_load_error(path, f"its weight files have no tensor {' or '.join(names)}")


def _quantised_head_error(
    path: Path, tensors: Mapping[str, _TensorInfo], name: str
) -> InvalidInput:
    return InvalidInput(
        f"the head of {path} is quantised: its weight files have {name} ({tensors[name].dtype})",
        field="--model",
        hint="give a checkpoint whose lm_head is not quantised; --engine vllm also accepts"
        " float8 or int8 with scales",
    )
