"""Losses of tokens, multiplied by the weights of their sequences."""

from __future__ import annotations

from torch import Tensor

from student_trainer.losses import Index, LossFunction, Rows


def weight_loss(loss: LossFunction, weights: Tensor | None) -> LossFunction:
    """Return `loss` times `weights` [N], one for each row of the batch; None: all are 1."""
    if weights is None:
        return loss

    def weighted_loss(rows: Rows, index: Index) -> Tensor:
        return loss(rows, index) * weights[index]

    return weighted_loss
