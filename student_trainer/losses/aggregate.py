"""Token weights: a loss is a weighted sum over tokens, divided by a global sum of weights.

- token-mean: every token has weight 1, so long answers have more influence than short ones.
- seq-mean-token-mean: every answer has weight 1, divided equally among its tokens.
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

from student_trainer.losses.fused.linear_loss import LossFunction
from student_trainer.losses.rows import Index, Rows

Aggregate = Literal["token-mean", "seq-mean-token-mean"]


def sequence_weights(lengths: Tensor, included: Tensor, aggregate: Aggregate) -> Tensor:
    """Return the weight of each sequence, [S] float64.

    - lengths [S]: number of learned tokens (tokens with a term in the loss) of each sequence.
    - included [S] bool: False for a masked answer. Its weight is 0.

    The loss is divided by the sum of these weights over all processes.
    """
    match aggregate:
        case "token-mean":
            return (lengths * included).double()
        case "seq-mean-token-mean":
            return ((lengths > 0) & included).double()
        case _:
            assert_never(aggregate)


def token_weights(lengths: Tensor, included: Tensor, aggregate: Aggregate) -> Tensor:
    """Return the weight of each token, [N] float32, sequence after sequence.

    N is the sum of `lengths`. The arguments are described in `sequence_weights`.
    """
    answer_token_weights = sequence_weights(lengths, included, aggregate) / lengths.clamp(min=1)
    return answer_token_weights.float().repeat_interleave(lengths)


def weight_loss(loss: LossFunction, weights: Tensor | None) -> LossFunction:
    """Return a loss function that multiplies the result of `loss` by `weights`.

    `weights` [N]: one weight for each row of the batch; None if all are 1.
    """
    if weights is None:
        return loss

    def weighted_loss(rows: Rows, index: Index) -> Tensor:
        return loss(rows, index) * weights[index]

    return weighted_loss
