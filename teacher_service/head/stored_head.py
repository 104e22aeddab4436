"""The head's weight in the files of a model: found by its name, read, and dequantised.

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

from protos.errors import InvalidInput
from teacher_service.models.files import weight_files
from teacher_service.models.loading import not_loaded
from teacher_service.models.quantisation import block_of, quantisation_of

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
# A weight with these values times the scales beside it is what the methods below store.
_SCALED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # a factor in both cases
_SCALE_DTYPES = (*_PLAIN_DTYPES, "F8_E8M0")
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt")
_OF_ACTIVATIONS = "input_scale"  # rounds what the head multiplies; its weight is the same


@dataclass(frozen=True)
class StoredWeight:
    """Names of the tensors of the head's weight; `scales`: None if it is not quantised."""

    weight: str
    scales: str | None = None


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]


def find_weight(path: Path, names: Sequence[str]) -> StoredWeight:
    """Return where the files have the head's weight, under the first of `names` that they have.

    Raises InvalidInput if they have none, or if the weight is quantised in a way whose exact values
    are not known.
    """
    stored = _beside(path, names)
    weight = next((name for name in names if name in stored), None)
    if weight is None and stored:
        raise _refused(path, stored, min(stored))
    if weight is None:
        raise _absent(path, names)
    layer = weight.rpartition(".")[0] + "."
    stored = {name: one for name, one in stored.items() if name.startswith(layer)}
    strange = _strange(stored, weight)
    if strange is None:
        return StoredWeight(weight)
    scales = [name for name in stored if name.removeprefix(layer) in _SCALE_NAMES]
    ours = {weight, *scales, layer + "bias", layer + _OF_ACTIVATIONS}
    quantisation = quantisation_of(path) or {}
    known = (
        quantisation.get("quant_method") in _METHODS
        and stored[weight].dtype in _SCALED_DTYPES
        and len(scales) == 1
        and stored[scales[0]].dtype in _SCALE_DTYPES
        and stored.keys() <= ours
        and _spread(stored[weight].shape, stored[scales[0]].shape, block_of(quantisation))
    )
    if not known:
        raise _refused(path, stored, strange)
    return StoredWeight(weight, scales[0])


def find_bias(path: Path, names: Sequence[str]) -> str:
    """Return the first of `names` that the files have. Raises InvalidInput if they have none."""
    stored = _beside(path, names)
    for name in names:
        if name in stored:
            return name
    raise _absent(path, names)


def read_weight(path: Path, stored: StoredWeight, ids: range | None = None) -> Tensor:
    """Return the rows `ids` [n, H] of the head's weight, all if None, on the CPU.

    They are as they are stored, or dequantised in float32. No other rows are read, but for those of
    a block that the rows share.
    """
    if stored.scales is None:
        return read_tensor(path, stored.weight, ids)
    scales, block = read_tensor(path, stored.scales), block_of(quantisation_of(path) or {})
    before = 0
    if ids is not None:
        shape = _beside(path, [stored.weight])[stored.weight].shape
        match _spread(shape, tuple(scales.shape), block):
            case "row":
                scales = scales[ids.start : ids.stop]
            case "block" if block:
                first = ids.start // block[0]
                scales = scales[first : math.ceil(ids.stop / block[0])]
                before = ids.start - first * block[0]
                ids = range(first * block[0], ids.stop)
    return dequantised(read_tensor(path, stored.weight, ids), scales, block)[before:]


def dequantised(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return values [V, H] times their scales, float32.

    `scales` has one number, one for each row ([V] or [V, 1]), or one for each `block` of rows and
    columns ([ceil(V / rows), ceil(H / columns)]). Raises ValueError for another shape.
    """
    weight, factors = values.to(torch.float32), scales.to(torch.float32)
    rows, columns = weight.shape
    spread = _spread((rows, columns), tuple(factors.shape), block)
    match spread:
        case "tensor":
            return weight.mul_(factors.reshape(()))
        case "row":
            return weight.mul_(factors.reshape(rows, 1))
    if spread != "block" or block is None:
        raise ValueError(f"scales of shape {tuple(factors.shape)} for {rows} x {columns} values")
    for number, line in enumerate(factors):
        part = weight[number * block[0] : (number + 1) * block[0]]
        part.mul_(line.repeat_interleave(block[1])[:columns])
    return weight


def require_plain_weight(path: Path, names: Sequence[str]) -> None:
    """Raise InvalidInput if the head's weight, stored under one of `names`, is quantised.

    Its values alone are wrong, and no self-test would notice: it compares the rows with each other.
    """
    stored = _beside(path, names)
    for name in names:
        if (strange := _strange(stored, name)) is not None:
            raise _refused(path, stored, strange)


def read_tensor(path: Path, name: str, rows: range | None = None) -> Tensor:
    """Return `rows` of a tensor of the weight files, all if None, on the CPU.

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


def _beside(path: Path, names: Sequence[str]) -> dict[str, _Stored]:
    """Return the tensors that the files have for the layers of `names`."""
    layers = tuple({name.rpartition(".")[0] + "." for name in names})
    found: dict[str, _Stored] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                if name.startswith(layers):
                    one: Any = tensors.get_slice(name)
                    found[name] = _Stored(one.get_dtype(), tuple(one.get_shape()))
    return found


def _strange(stored: Mapping[str, _Stored], weight: str) -> str | None:
    """Return a tensor of the weight's layer that a layer without quantisation has not."""
    layer = weight.rpartition(".")[0] + "."
    plain = (layer + "weight", layer + "bias")
    of_layer = {name: one for name, one in stored.items() if name.startswith(layer)}
    for name, one in of_layer.items():
        if name not in plain or one.dtype not in _PLAIN_DTYPES:
            return name
    return None


def _spread(weight: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> str:
    """Return how much of the weight a scale is for: "tensor", "row" or "block"; "": not known."""
    if math.prod(scales) == 1:
        return "tensor"
    if scales in ((weight[0],), (weight[0], 1)):
        return "row"
    blocks = block and (math.ceil(weight[0] / block[0]), math.ceil(weight[1] / block[1]))
    return "block" if scales == blocks else ""


def _absent(path: Path, names: Sequence[str]) -> InvalidInput:
    return not_loaded(path, f"its weight files have no tensor {' or '.join(names)}")


def _refused(path: Path, stored: Mapping[str, _Stored], name: str) -> InvalidInput:
    return InvalidInput(
        f"the head of {path} is quantised: its weight files have {name} ({stored[name].dtype})",
        field="--model",
        hint="give a checkpoint whose lm_head is not quantised; --engine vllm also takes one in"
        " float8 or int8 with scales",
    )
