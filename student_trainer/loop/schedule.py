"""The learning rate of each step."""

from __future__ import annotations

import math

from clients.config.common import TrainConfig


def learning_rate(train: TrainConfig, step: int, max_steps: int) -> float:
    """The rate of `step` (from 1): a pure function, so a resume needs no scheduler state."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    left = (max_steps - step + 1) / max(1, max_steps - train.warmup_steps)
    match train.schedule:
        case "constant":
            return train.learning_rate
        case "linear":
            return train.learning_rate * left
        case "cosine":
            return train.learning_rate * (1 - math.cos(math.pi * left)) / 2
