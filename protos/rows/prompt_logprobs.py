"""Parses vLLM's `prompt_logprobs`: for each position, a dict with the log-probs of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.rows.checks import ROUNDING, are_logprobs
from protos.rows.codec import RowBlock

# The tail mass is 1 minus a sum of float32 numbers, so a smaller tail mass is only rounding error.
_MIN_TAIL = 2.0**-24


def rows_of_listed(
    listed: Sequence[Mapping[str, Any]], token_ids: NDArray[np.int32], k: int
) -> RowBlock:
    """Return the rows of n positions, with their k most likely ids as the head.

    - `listed`: for each position, vLLM's dict {id: {"logprob", "rank"}} of the k most likely ids
      and of the token
    - `token_ids`: int32 [n], the tokens at these positions

    The dict of a position contains the token even if it is not among the k most likely ids. Such a
    token is not part of the head: a head that depends on the token would make the Top-k KL biased.

    Raises ValueError if a position has other ids, or values that are not log-probs.
    """
    n = len(token_ids)
    if len(listed) != n:
        raise ValueError(f"{len(listed)} rows in place of {n}")
    ids, head = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    tokens = np.empty(n, np.float32)
    for row, entries in enumerate(listed):
        try:
            tokens[row] = entries[str(token_ids[row])]["logprob"]
            ranked = [
                (entry["rank"], int(name), entry["logprob"])
                for name, entry in entries.items()
                if entry["rank"] <= k
            ]
            if len(ranked) != k:
                raise ValueError(f"a row of {len(ranked)} likeliest ids in place of {k}")
            ranked.sort()
            ids[row] = [name for _, name, _ in ranked]
            head[row] = [logprob for _, _, logprob in ranked]
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a row that cannot be read: {error!r}") from error
    return block_of_head(ids, head, tokens)


def block_of_head(
    ids: NDArray[np.int32],
    head: NDArray[np.float32],
    tokens: NDArray[np.float32],
    draws: NDArray[np.float32] | None = None,
) -> RowBlock:
    """Return rows whose tail mass is computed as one minus the mass of the head.

    - `ids`: int32 [n, k], the head ids
    - `head`: float32 [n, k], the log-probs of the head ids
    - `tokens`: float32 [n], the log-probs of the sampled tokens
    - `draws`: float32 [n, M], the log-probs of ids that the student drew; None without draws

    Raises ValueError for values that are not log-probs of a softmax, and for a row that has an id
    twice.
    """
    sorted_ids = np.sort(ids, axis=1)
    if (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any():
        raise ValueError("a row with an id twice")
    for name, logprobs in (("head ids", head), ("token", tokens), ("drawn ids", draws)):
        if logprobs is not None and not are_logprobs(logprobs):
            row = int((~(logprobs <= ROUNDING)).reshape(len(ids), -1).any(axis=1).argmax())
            raise ValueError(
                f"in row {row} (from 0), a log-prob of the {name} is {logprobs[row].max():g}, but"
                " log-probs of a softmax are at most 0"
            )
    mass = np.exp(head.astype(np.float64)).sum(axis=1)
    if (mass > 1 + ROUNDING).any():
        row = int(mass.argmax())
        raise ValueError(
            f"in row {row} (from 0), the probabilities of the head ids have the sum {mass[row]:g},"
            " but those of a softmax have at most the sum 1"
        )
    tail = np.log(np.maximum(1 - mass, _MIN_TAIL)).astype(np.float32)
    return RowBlock(ids, head, tail, tokens, draw_logprobs=draws)
