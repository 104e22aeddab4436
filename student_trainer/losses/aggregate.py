"""What each token counts, so that a loss is a sum over tokens divided once by a global count.

token-mean           sum over all tokens / number of tokens: long answers count more
seq-mean-token-mean  the mean over sequences of the means over their tokens
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor

Aggregate = Literal["token-mean", "seq-mean-token-mean"]


def sequence_weights(lengths: Tensor, kept: Tensor, aggregate: Aggregate) -> Tensor:
    """What each sequence counts, [S] float64; over all processes their sum is what divides.

    lengths [S] in learned tokens; kept [S] bool, False of an answer that is masked: it counts
    nothing, in the sum as in the count.
    """
    match aggregate:
        case "token-mean":
            return (lengths * kept).double()
        case "seq-mean-token-mean":
            return ((lengths > 0) & kept).double()
        case _:
            assert_never(aggregate)


def token_weights(lengths: Tensor, kept: Tensor, aggregate: Aggregate) -> Tensor:
    """What each token counts, [N = sum of lengths] float32, sequence after sequence."""
    each = sequence_weights(lengths, kept, aggregate) / lengths.clamp(min=1)
    return each.float().repeat_interleave(lengths)
