"""Checks of token ids and log-probs that another program has sent.

Each check makes one or two passes over an array, and creates no Python object per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import Corrupt
from protos.rows.codec import RowBlock

# A log-prob, or the sum of a head's probabilities, may exceed 0 or 1 by rounding.
ROUNDING = 1e-3


def are_ids(ids: NDArray[np.int32], vocab_size: int) -> bool:
    """Return whether all ids are at least 0 and less than vocab_size."""
    # As unsigned numbers, negative ids are the largest, so one comparison is enough.
    return not ids.size or bool(ids.view(np.uint32).max() < vocab_size)


def are_logprobs(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether all values (float16 or float32) are log-probs: at most ROUNDING, and not NaN.

    -inf is a log-prob, too: that of a token that the model excludes, or a value below float16's
    range.
    """
    if not values.size:
        return True
    width = values.dtype.itemsize
    # Compare bits as integers, because comparing float16 is 100 times slower. The bits of positive
    # floats have the order of signed integers, the bits of negative floats the order of unsigned
    # integers, and NaN is beyond infinity.
    limits = np.array([ROUNDING, -np.inf], values.dtype)
    signed, unsigned = f"i{width}", f"u{width}"
    return bool(
        values.view(signed).max() <= limits.view(signed)[0]
        and values.view(unsigned).max() <= limits.view(unsigned)[1]
    )


def check_rows(block: RowBlock, vocab_size: int) -> None:
    """Raise Corrupt if a block has an id outside the vocabulary, or a value that is no log-prob."""
    for name in ("head_ids", "tail_sample_ids"):
        ids = getattr(block, name)
        if ids is not None and not are_ids(ids, vocab_size):
            raise Corrupt(
                f"rows have {name} from {ids.min()} to {ids.max()}, but there are {vocab_size} ids"
            )
    for name in (
        "head_logprobs",
        "tail_logmass",
        "token_logprobs",
        "tail_sample_logprob",
        "draw_logprobs",
    ):
        values = getattr(block, name)
        if values is not None and not are_logprobs(values):
            raise Corrupt(f"rows have {name} that are above 0 or NaN, which are not log-probs")
