"""Requests to a vLLM server for the log-probs of a prompt, and the rows in its answers.

vLLM has two ways. `/inference/v1/generate` scores given ids of each row and answers with one array;
`/v1/completions` returns the k likeliest ids of each row, and the sampled token, as JSON. In both,
the head's log-probs and the token's come from the server; the tail mass is one minus the head's.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock

CHOSEN_IDS = "/inference/v1/generate"
LIKELIEST = "/v1/completions"
# A log-prob, or the sum of a head's probabilities, may exceed 0 or 1 by rounding.
_ROUNDING = 1e-3
# The tail mass is 1 minus a sum of float32 numbers: what is smaller is lost in their rounding.
_LEAST_TAIL = 2.0**-24


def ask_chosen_ids(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the log-probs of the query's head ids, draws and tokens."""
    return {
        "model": model,
        "token_ids": query.token_ids.tolist(),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": _columns(query).tolist(),
            # vLLM counts rows from 0: its row i scores token i + 1.
            "prompt_logprob_start": query.start - 1,
        },
    }


def rows_of_chosen_ids(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `ask_chosen_ids`. Raises Corrupt if they are not rows."""
    try:
        data = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
        found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False).astype(np.float32)
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise _corrupt(f"has no log-probs of the ids: {error!r}") from error
    expected = _columns(query).shape
    if found.shape != expected:
        raise _corrupt(f"has log-probs {list(found.shape)} in place of {list(expected)}")
    assert query.head_ids is not None
    k = query.k
    draws = None if query.draw_ids is None else found[:, k:-1]
    return _block(query.head_ids, found[:, :k], found[:, -1], draws)


def ask_likeliest(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the `top_k` likeliest ids of each row."""
    return {
        "model": model,
        "prompt": query.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": query.k,
    }


def rows_of_likeliest(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `ask_likeliest`.

    The sampled token is in a row's dict even if it is not among the k likeliest. It is not part of
    the head: a head that depends on the sampled token makes the Top-k KL biased.

    Raises Corrupt if the answer has other rows than asked for.
    """
    try:
        listed: Sequence[Any] = answer["choices"][0]["prompt_logprobs"][query.start :]
    except (KeyError, IndexError, TypeError) as error:
        raise _corrupt("has no prompt_logprobs") from error
    if len(listed) != query.rows:
        raise _corrupt(f"has {len(listed)} rows in place of {query.rows}")
    ids = np.empty((query.rows, query.k), np.int32)
    head = np.empty((query.rows, query.k), np.float32)
    tokens = np.empty(query.rows, np.float32)
    for row, entries in enumerate(listed):
        try:
            tokens[row] = entries[str(query.token_ids[query.start + row])]["logprob"]
            ranked = [
                (one["rank"], int(name), one["logprob"])
                for name, one in entries.items()
                if one["rank"] <= query.k
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(f"has a row that cannot be read: {error!r}") from error
        if len(ranked) != query.k:
            raise _corrupt(f"has a row of {len(ranked)} likeliest ids in place of {query.k}")
        ranked.sort()
        ids[row] = [name for _, name, _ in ranked]
        head[row] = [logprob for _, _, logprob in ranked]
    return _block(ids, head, tokens, None)


def _columns(query: ScoreQuery) -> NDArray[np.int32]:
    """Return the ids [n, k + M + 1] whose log-probs the rows need; the last is the token's."""
    assert query.head_ids is not None
    parts = [query.head_ids, query.token_ids[query.start :, None]]
    if query.draw_ids is not None:
        parts.insert(1, query.draw_ids)
    return np.concatenate(parts, axis=1)


def _block(
    ids: NDArray[np.int32],
    head: NDArray[np.float32],
    tokens: NDArray[np.float32],
    draws: NDArray[np.float32] | None,
) -> RowBlock:
    given = [head, tokens[:, None], *([] if draws is None else [draws])]
    mass = np.exp(head.astype(np.float64)).sum(axis=1)
    if not all((one <= _ROUNDING).all() for one in given) or (mass > 1 + _ROUNDING).any():
        raise _corrupt(
            "has numbers that are no log-probs of a softmax; start its server with"
            " --logprobs-mode raw_logprobs"
        )
    tail = np.log(np.maximum(1 - mass, _LEAST_TAIL)).astype(np.float32)
    return RowBlock(ids, head, tail, tokens, draw_logprobs=draws)


def _corrupt(problem: str) -> Corrupt:
    return Corrupt(
        f"the answer of the endpoint {problem}", hint="check what serves behind this teacher"
    )
