"""The learning rate schedule: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from clients.config.tables.common import TrainConfig


def learning_rate(train: TrainConfig, step: int, max_steps: int) -> float:
    """Return the rate of `step` (from 1). A pure function, so a resume needs no scheduler state.

    `train.learning_rate` is the peak; linear and cosine reach almost zero at `max_steps`.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    remaining_share = (max_steps - step + 1) / max(1, max_steps - train.warmup_steps)
    match train.schedule:
        case "constant":
            return train.learning_rate
        case "linear":
            return train.learning_rate * remaining_share
        case "cosine":
            return train.learning_rate * (1 - math.cos(math.pi * remaining_share)) / 2
