"""PPO's critic: what reward is still to be expected before a token, from the student's own states.

The states are those that the head reads, so there is no second model and no second forward pass.
They are read without a gradient: the critic learns from them and does not bend them, so there is no
weight between its loss and the policy's, and a policy is the same whoever judges it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """One linear layer, float32, that begins at zero: with nothing expected, GAE is the reward."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The value [N] before each token, from the states [N, H] that its row comes out of."""
        values: Tensor = self.linear(hidden.detach().to(self.linear.weight.dtype))
        return values.squeeze(1)


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> Tensor:
    """max((V - R)^2, (V_clipped - R)^2) / 2 of each token, [N]; PPO, arXiv 1707.06347 and its code.

    targets [N]: R of `gae`; V_clipped is within `clip` of old_values [N], those that the advantages
    were made from: a value that has gone further towards its target earns nothing more.
    """
    old_values, targets = old_values.detach(), targets.detach()
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets).square(), (near - targets).square()) / 2
