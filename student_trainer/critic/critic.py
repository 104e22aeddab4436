"""The PPO critic: predicts the remaining reward before each token from the student's hidden states.

The states are those that the head reads, so there is no second model. They are detached: the critic
does not train the student, so its loss needs no weight relative to the policy's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """One float32 linear layer, initialised to zero.

    While all values are 0, GAE is the reward, discounted by gamma * lam per token.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the value [N] before each token, from the states [N, H] that give its row."""
        values: Tensor = self.linear(hidden.detach().to(self.linear.weight.dtype))
        return values.squeeze(1)


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> Tensor:
    """Return the clipped value loss of each token, max((V - R)^2, (V_clipped - R)^2) / 2, [N].

    `targets` [N]: R, from `gae`. `old_values` [N]: the values from which the advantages were
    computed; V_clipped is V clipped to within `clip` of them. A value that has moved further than
    `clip` towards its target has no gradient. The clipping follows the code of PPO (arXiv
    1707.06347), not the paper, which does not clip values.
    """
    old_values, targets = old_values.detach(), targets.detach()
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets).square(), (clipped_values - targets).square()) / 2
