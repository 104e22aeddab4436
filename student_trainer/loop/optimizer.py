"""The optimizer of the student's trainable weights."""

from __future__ import annotations

import torch
from torch import nn

from clients.config.tables.common import TrainConfig


def make_optimizer(
    settings: TrainConfig, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW (arXiv 1711.05101) for the trainable weights of `model`.

    `device`: of the computation. On a GPU one kernel updates many weights (`fused`); the CPU keeps
    PyTorch's default, which updates one weight after the other.
    """
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        weight_decay=settings.weight_decay,
        fused=True if device.type == "cuda" else None,
    )
