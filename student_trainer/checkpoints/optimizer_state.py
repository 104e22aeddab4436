"""The state of AdamW in a checkpoint.

    NAME/step                number of updates of the weight NAME
    NAME/exp_avg             first moment, in the shape of the weight
    NAME/exp_avg_sq          second moment, in the shape of the weight

With 8-bit moments (`train.optimizer = "adamw_8bit"`), each moment is stored as two tensors:

    NAME/exp_avg.codes       uint8, in the shape of the weight
    NAME/exp_avg.scales      float32 [rows, blocks of a row]: the largest magnitude of each block

A block never spans two rows. The process that has a row of the weight therefore has all blocks of
this row. For this reason, any number of processes can load a checkpoint exactly.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from protos.errors import InvalidInput
from student_trainer.checkpoints.tensor_file import read_rows, read_shard
from student_trainer.parallel.shards import local, tensor_with_rows, tensor_with_shard

# Elements of an 8-bit block: the widths of most models are multiples of 64, but not of 256.
BLOCK = 64
_MIN_NUMBERS = 4096  # elements of the smallest weight with 8-bit moments, as in bitsandbytes
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_quantized(weight: Tensor) -> bool:
    """Return whether an 8-bit optimizer stores the moments of `weight` in 8 bits.

    The moments stay float32 for a small weight, and for a weight whose rows are not a multiple of
    BLOCK elements. For a sharded weight, the shape of the full weight decides.
    """
    return (
        weight.numel() >= _MIN_NUMBERS and weight.dim() > 1 and prod(weight.shape[1:]) % BLOCK == 0
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state by their names in the checkpoint.

    The tensors are not copies.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        quantized = _holds_8_bits(optimizer, parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            if quantized and kind in _MOMENTS:
                codes, scales = _split_moment(local(value))
                tensors[f"{name}/{kind}.codes"] = tensor_with_rows(codes, parameter)
                tensors[f"{name}/{kind}.scales"] = tensor_with_rows(scales, parameter)
            else:
                tensors[f"{name}/{kind}"] = value
    return tensors


def load_optimizer_state(file: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's state from an open safetensors file. Each process reads only its shard.

    Raises InvalidInput (`train.optimizer`) if another kind of optimizer has written the state.
    """
    keys = set(file.keys())
    for name, parameter in model.named_parameters():
        if f"{name}/step" not in keys:
            continue
        quantized = _holds_8_bits(optimizer, parameter)
        if quantized != (f"{name}/exp_avg.codes" in keys):
            raise InvalidInput(
                "the run started with another optimizer",
                field="train.optimizer",
                hint="resume with the value the run started with, or submit a new job",
            )
        load = _load_quantized if quantized else _load_float32
        moments = {kind: load(file, f"{name}/{kind}", parameter, optimizer) for kind in _MOMENTS}
        optimizer.state[parameter] = {
            "step": _load_step(file, name, parameter, optimizer),
            **moments,
        }


def _load_step(file: Any, name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    # The fused kernel counts steps on the weight's device, all others on the CPU.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    step: Tensor = file.get_tensor(f"{name}/step")
    return step.to(parameter.device) if fused else step


def _load_float32(file: Any, key: str, parameter: Tensor, _: torch.optim.Optimizer) -> Tensor:
    return tensor_with_shard(read_shard(file, key, parameter), parameter)


def _load_quantized(file: Any, key: str, parameter: Tensor, optimizer: Any) -> Tensor:
    moment: Tensor = optimizer.new_moment(parameter, signed=key.endswith("exp_avg"))
    codes, scales = _split_moment(local(moment))
    codes.copy_(read_shard(file, f"{key}.codes", parameter))
    scales.copy_(read_rows(file, f"{key}.scales", parameter))
    return moment


def _holds_8_bits(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return hasattr(optimizer, "new_moment") and is_quantized(parameter)


def _split_moment(moment: Any) -> tuple[Tensor, Tensor]:
    """Return the two tensors of an 8-bit moment: its codes, and its scales [rows, blocks of a row].

    torchao does not support a moment without rows. Such a moment is an empty float32 tensor, for
    which two empty tensors are returned.
    """
    if not len(moment):
        empty = moment.new_empty(0, prod(moment.shape[1:]) // BLOCK)
        return torch.empty_like(moment, dtype=torch.uint8), empty
    return moment.codes, moment.scale.view(len(moment), -1)
