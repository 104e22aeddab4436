"""Requests to a server for the log-probs of a prompt, and the parser of its responses.

vLLM has two APIs. `/inference/v1/generate` scores given ids of each row and returns one array.
`/v1/completions` returns the k likeliest ids of each row and the sampled token, as JSON. Other
servers echo the prompt with log-probs, as an old version of OpenAI's `/v1/completions` does. In all
cases, the server returns the log-probs of the head and of the token; the tail mass is one minus the
mass of the head.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock
from protos.rows.prompt_logprobs import block_of_head, rows_of_listed

CHOSEN_IDS = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_ID_PREFIX = "token_id:"


def build_chosen_ids_body(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the log-probs of the query's head ids, draws and tokens."""
    return {
        "model": model,
        "token_ids": query.token_ids.tolist(),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": _list_scored_ids(query).tolist(),
            # vLLM counts rows from 0: its row i scores token i + 1.
            "prompt_logprob_start": query.start - 1,
        },
    }


def read_chosen_ids_rows(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `build_chosen_ids_body`. Raises Corrupt for other data."""
    try:
        data = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
        logprobs = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False).astype(np.float32)
    except (KeyError, TypeError, ValueError, EOFError, MemoryError) as error:
        raise _corrupt_answer(f"has no log-probs of the ids: {error!r}") from error
    expected = _list_scored_ids(query).shape
    if logprobs.shape != expected:
        raise _corrupt_answer(f"has log-probs {list(logprobs.shape)} in place of {list(expected)}")
    assert query.head_ids is not None
    k = query.k
    draw_logprobs = None if query.draw_ids is None else logprobs[:, k:-1]
    with _raise_corrupt():
        return block_of_head(query.head_ids, logprobs[:, :k], logprobs[:, -1], draw_logprobs)


def _build_vllm_body(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the `top_k` likeliest ids of each row."""
    return {
        "model": model,
        "prompt": query.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": query.k,
    }


def _read_vllm_rows(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `_build_vllm_body`; see `rows_of_listed`.

    Raises Corrupt if the rows do not match the query.
    """
    try:
        row_entries: Sequence[Any] = answer["choices"][0]["prompt_logprobs"][query.start :]
    except (KeyError, IndexError, TypeError) as error:
        raise _corrupt_answer("has no prompt_logprobs") from error
    with _raise_corrupt():
        return rows_of_listed(row_entries, query.token_ids[query.start :], query.k)


def _build_echo_body(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the prompt with the log-probs of k + 1 ids of each row."""
    return {
        "model": model,
        "prompt": query.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": query.k + 1,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,  # vLLM then makes no text of the prompt
    }


def _read_echo_rows(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `_build_echo_body`.

    The answer has an object such as {"token_id:5": -0.1, ...} for each position. Some servers add
    the sampled token to the listed ids, and others replace the last id by the sampled token, so a
    head of all listed ids would be biased. The k likeliest of k + 1 listed ids are the same in both
    cases. Raises Corrupt if the rows do not match the query.
    """
    start, end = query.start, len(query.token_ids)  # the generated token follows
    try:
        logprobs = answer["choices"][0]["logprobs"]
        token_names = logprobs["tokens"][start:end]
        token_logprobs = np.array(logprobs["token_logprobs"][start:end], np.float64)
        rows = [_select_top_k(row, query.k) for row in logprobs["top_logprobs"][start:end]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _corrupt_answer(f"echoes no tokens with log-probs: {error!r}") from error
    if (
        token_names != [f"{_ID_PREFIX}{token}" for token in query.token_ids[start:]]
        or len(rows) != query.rows
    ):
        raise _corrupt_answer("echoes other tokens, or their texts in place of their ids")
    if not all(rows):
        raise _corrupt_answer(f"has fewer than {query.k + 1} ids in a row")
    with _raise_corrupt():
        ids = np.array([[token for _, token in row] for row in rows], np.int32)
        head_logprobs = np.array([[logprob for logprob, _ in row] for row in rows], np.float32)
        return block_of_head(ids, head_logprobs, token_logprobs.astype(np.float32))


def _select_top_k(logprob_by_name: Mapping[str, float], k: int) -> list[tuple[float, int]]:
    """Return the k largest log-probs of a row with their ids, the largest first.

    Returns an empty list if the row has at most k ids. Raises ValueError if the row has texts in
    place of ids.
    """
    entries = (
        (logprob, int(name.removeprefix(_ID_PREFIX))) for name, logprob in logprob_by_name.items()
    )
    ranked = sorted(entries, key=lambda entry: (-entry[0], entry[1]))
    return ranked[:k] if len(ranked) > k else []


@dataclass(frozen=True)
class LikeliestWire:
    """The request and answer format of a server for the `top_k` likeliest ids of each row.

    `build_body` returns the JSON body of a POST to COMPLETIONS for a query and a model name;
    `read_rows` reads the answer, and raises Corrupt if its rows do not match the query.
    """

    build_body: Callable[[ScoreQuery, str], dict[str, Any]]
    read_rows: Callable[[ScoreQuery, Mapping[str, Any]], RowBlock]


VLLM = LikeliestWire(_build_vllm_body, _read_vllm_rows)
ECHO = LikeliestWire(_build_echo_body, _read_echo_rows)


def _list_scored_ids(query: ScoreQuery) -> NDArray[np.int32]:
    """Return the ids [n, k + M + 1] whose log-probs the rows need; the last id is the token."""
    assert query.head_ids is not None
    parts = [query.head_ids, query.token_ids[query.start :, None]]
    if query.draw_ids is not None:
        parts.insert(1, query.draw_ids)
    return np.concatenate(parts, axis=1)


@contextmanager
def _raise_corrupt() -> Iterator[None]:
    """Convert an error of the block to Corrupt: a part of the answer has a wrong type or value."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except (ValueError, TypeError, OverflowError) as error:
        hint = "; start its server with --logprobs-mode raw_logprobs"
        raise _corrupt_answer(
            f"has wrong rows: {error}{hint if 'softmax' in str(error) else ''}"
        ) from error


def _corrupt_answer(problem: str) -> Corrupt:
    return Corrupt(
        f"the answer of the endpoint {problem}", hint="check the server behind this teacher"
    )
