"""Requests to a server for the log-probs of a prompt, and the rows in its answers.

vLLM has two ways: `/inference/v1/generate` scores given ids of each row, sent as one array;
`/v1/completions` returns the k likeliest ids of each row, and the sampled token, as JSON. SGLang's
`/generate` has the same, in other words; ids that it is given are the same for all rows. Others
echo the prompt with log-probs, as OpenAI's `/v1/completions` once did. In all, the head's log-probs
and the token's come from the server; the tail mass is one minus the head's.
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
_COMPLETIONS = "/v1/completions"
_ID = "token_id:"


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


def _ask_vllm(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks for the `top_k` likeliest ids of each row."""
    return {
        "model": model,
        "prompt": query.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": query.k,
    }


def _rows_of_vllm(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `_ask_vllm`; see `rows_of_listed`.

    Raises Corrupt if the answer has other rows than asked for.
    """
    try:
        listed: Sequence[Any] = answer["choices"][0]["prompt_logprobs"][query.start :]
    except (KeyError, IndexError, TypeError) as error:
        raise _corrupt("has no prompt_logprobs") from error
    with _corrupt_if_refused():
        return rows_of_listed(listed, query.token_ids[query.start :], query.k)


def _ask_sglang(query: ScoreQuery, model: str) -> dict[str, Any]:
    """Return the body that asks SGLang, which has one model, for what `_ask_vllm` asks for."""
    return {
        "input_ids": query.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        # The first token after it has the first log-prob.
        "logprob_start_len": query.start - 1,
        "top_logprobs_num": query.k,
    }


def _rows_of_sglang(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `_ask_sglang`; a log-prob is [NATS, ID, ...] there.

    Raises Corrupt if the answer has other rows than asked for.
    """
    tokens = query.token_ids[query.start :]
    try:
        found = answer["meta_info"]
        of_tokens = [one[:2] for one in found["input_token_logprobs"][-query.rows :]]
        of_head = [[one[:2] for one in row] for row in found["input_top_logprobs"][-query.rows :]]
        scored, head = np.array(of_tokens, np.float64), np.array(of_head, np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(f"has no log-probs of the input: {error!r}") from error
    if scored.shape != (query.rows, 2) or not np.array_equal(scored[:, 1], tokens):
        raise _corrupt("has log-probs of other tokens")
    if head.shape != (query.rows, query.k, 2):
        expected = [query.rows, query.k]
        raise _corrupt(f"has {list(head.shape[:2])} likeliest ids in place of {expected}")
    with _corrupt_if_refused():
        return block_of_head(
            head[:, :, 1].astype(np.int32),
            head[:, :, 0].astype(np.float32),
            scored[:, 0].astype(np.float32),
        )


def _ask_echo(query: ScoreQuery, model: str) -> dict[str, Any]:
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


def _rows_of_echo(query: ScoreQuery, answer: Mapping[str, Any]) -> RowBlock:
    """Return the rows in the answer to `_ask_echo`, where {"token_id:5": -0.1, ...} is a position.

    A server adds the sampled token to the ids that it lists, or puts it in the place of the last
    one, and does not say which: a head with it would be biased. The k likeliest of k + 1 ids are
    the same in each case. Raises Corrupt if the answer has other rows than asked for.
    """
    first, end = query.start, len(query.token_ids)  # the generated token follows
    try:
        found = answer["choices"][0]["logprobs"]
        names = found["tokens"][first:end]
        tokens = np.array(found["token_logprobs"][first:end], np.float32)
        rows = [_likeliest(row, query.k) for row in found["top_logprobs"][first:end]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(f"echoes no tokens with log-probs: {error!r}") from error
    if names != [f"{_ID}{token}" for token in query.token_ids[first:]] or len(rows) != query.rows:
        raise _corrupt("echoes other tokens, or their texts in place of their ids")
    if not all(rows):
        raise _corrupt(f"has fewer than {query.k + 1} ids in a row")
    ids = np.array([[token for _, token in row] for row in rows], np.int32)
    head = np.array([[logprob for logprob, _ in row] for row in rows], np.float32)
    with _corrupt_if_refused():
        return block_of_head(ids, head, tokens)


def _likeliest(listed: Mapping[str, float], k: int) -> list[tuple[float, int]]:
    """Return the k largest log-probs of a row with their ids; none if it has not more than k.

    Raises ValueError if it has texts in place of ids.
    """
    named = ((logprob, int(name.removeprefix(_ID))) for name, logprob in listed.items())
    ranked = sorted(named, key=lambda one: (-one[0], one[1]))
    return ranked[:k] if len(ranked) > k else []


@dataclass(frozen=True)
class LikeliestWire:
    """How a server is asked for the `top_k` likeliest ids of each row, and answers.

    `ask` makes the body of a POST to `path` of a query and the name of the model; `rows` reads the
    answer, and raises Corrupt if it has other rows than asked for.
    """

    path: str
    ask: Callable[[ScoreQuery, str], dict[str, Any]]
    rows: Callable[[ScoreQuery, Mapping[str, Any]], RowBlock]


VLLM = LikeliestWire(_COMPLETIONS, _ask_vllm, _rows_of_vllm)
SGLANG = LikeliestWire("/generate", _ask_sglang, _rows_of_sglang)
ECHO = LikeliestWire(_COMPLETIONS, _ask_echo, _rows_of_echo)


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
