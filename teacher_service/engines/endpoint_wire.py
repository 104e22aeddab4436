"""Requests to a vLLM server for the log-probs of a prompt, and the rows in its answers.

vLLM has two ways. `/inference/v1/generate` scores given ids of each row and answers with one array;
`/v1/completions` returns the k likeliest ids of each row, and the sampled token, as JSON. In both,
the head's log-probs and the token's come from the server; the tail mass is one minus the head's.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock
from protos.rows.prompt_logprobs import block_of_head, rows_of_listed

CHOSEN_IDS = "/inference/v1/generate"
LIKELIEST = "/v1/completions"


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
    with _corrupt_if_refused():
        return block_of_head(query.head_ids, found[:, :k], found[:, -1], draws)


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
    """Return the rows in the answer to `ask_likeliest`; see `rows_of_listed`.

    Raises Corrupt if the answer has other rows than asked for.
    """
    try:
        listed: Sequence[Any] = answer["choices"][0]["prompt_logprobs"][query.start :]
    except (KeyError, IndexError, TypeError) as error:
        raise _corrupt("has no prompt_logprobs") from error
    with _corrupt_if_refused():
        return rows_of_listed(listed, query.token_ids[query.start :], query.k)


def _columns(query: ScoreQuery) -> NDArray[np.int32]:
    """Return the ids [n, k + M + 1] whose log-probs the rows need; the last is the token's."""
    assert query.head_ids is not None
    parts = [query.head_ids, query.token_ids[query.start :, None]]
    if query.draw_ids is not None:
        parts.insert(1, query.draw_ids)
    return np.concatenate(parts, axis=1)


@contextmanager
def _corrupt_if_refused() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        hint = "; start its server with --logprobs-mode raw_logprobs"
        raise _corrupt(f"has {error}{hint if 'softmax' in str(error) else ''}") from error


def _corrupt(problem: str) -> Corrupt:
    return Corrupt(
        f"the answer of the endpoint {problem}", hint="check what serves behind this teacher"
    )
