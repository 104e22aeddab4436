"""AdamW's state as tensors of a checkpoint, and back.

NAME/step           number of updates of the weight NAME
NAME/exp_avg        first moment, in the shape of the weight
NAME/exp_avg_sq     second moment
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from student_trainer.checkpoints.tensor_file import read_rows
from student_trainer.parallel.sharding import with_rows


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state by name; the tensors are not copies."""
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(file: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state from an open safetensors file, in each process its shard."""
    kinds = defaultdict(list)
    for key in file.keys():  # noqa: SIM118 (the file is no mapping)
        name, kind = key.rsplit("/", 1)
        kinds[name].append(kind)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        if name in kinds:
            optimizer.state[parameter] = {
                # The fused kernel counts steps on the weight's device, all others on the CPU.
                kind: file.get_tensor(f"{name}/step").to(parameter.device if fused else "cpu")
                if kind == "step"
                else with_rows(read_rows(file, f"{name}/{kind}", parameter), parameter)
                for kind in kinds[name]
            }
