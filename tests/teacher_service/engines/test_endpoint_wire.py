"""Answers of third-party servers with one value changed: rows of log-probs, or Corrupt."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.checks import check_rows
from protos.rows.codec import RowBlock
from teacher_service.engines.endpoint_wire import ECHO, VLLM, read_chosen_ids_rows

VOCABULARY, START, K = 12, 2, 3
TOKENS = np.array([1, 5, 3, 7, 2], np.int32)
ROWS = len(TOKENS) - START
LOGPROBS = np.random.default_rng(0).normal(size=(len(TOKENS), VOCABULARY))
LOGPROBS -= np.log(np.exp(LOGPROBS).sum(axis=1, keepdims=True))
ORDER = np.argsort(-LOGPROBS, axis=1)
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 12, 1.5, 1 << 40, 10**400, 1e300, -1e300, float("nan"), float("inf")),
    *("", "a text", "-1", "7", "token_id:-1", b"x", [], [1], [[]], {}, {"5": -1.0}),
)


def make_vllm_answer() -> Any:
    rows: list[Any] = [None]
    for position in range(1, len(TOKENS)):
        ids = dict.fromkeys([int(TOKENS[position]), *ORDER[position, :K].tolist()])
        ranks = {token_id: ORDER[position].tolist().index(token_id) + 1 for token_id in ids}
        rows.append(
            {str(i): {"logprob": float(LOGPROBS[position, i]), "rank": ranks[i]} for i in ids}
        )
    return {"choices": [{"prompt_logprobs": rows}]}


def make_echo_answer() -> Any:
    positions = range(1, len(TOKENS))
    rows = [{f"token_id:{i}": float(LOGPROBS[p, i]) for i in ORDER[p, : K + 1]} for p in positions]
    return {
        "choices": [
            {
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in (*TOKENS, 0)],
                    "token_logprobs": [
                        None,
                        *(float(LOGPROBS[p, TOKENS[p]]) for p in positions),
                        -1.0,
                    ],
                    "top_logprobs": [None, *rows, {}],
                }
            }
        ]
    }


def make_chosen_ids_answer() -> Any:
    file = io.BytesIO()
    positions = np.arange(START, len(TOKENS))
    head = np.take_along_axis(LOGPROBS[START:], ORDER[START:, :K], axis=1)
    np.save(file, np.c_[head, LOGPROBS[positions, TOKENS[START:]]].astype(np.float32))
    return {"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}


TOP_QUERY = ScoreQuery(TOKENS, START, top_k=K)
CHOSEN_QUERY = ScoreQuery(TOKENS, START, head_ids=ORDER[START:, :K].astype(np.int32))
CASES: dict[str, tuple[ScoreQuery, Callable[[ScoreQuery, Any], RowBlock], Callable[[], Any]]] = {
    "vllm": (TOP_QUERY, VLLM.read_rows, make_vllm_answer),
    "echo": (TOP_QUERY, ECHO.read_rows, make_echo_answer),
    "chosen ids": (CHOSEN_QUERY, read_chosen_ids_rows, make_chosen_ids_answer),
}


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value in a document, and to the document itself."""
    yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        yield from paths_in(entry, (*path, key))


def replace_at(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return document


@pytest.mark.parametrize("name", CASES)
def test_an_answer_with_one_value_changed(name: str) -> None:
    query, read_rows, make_answer = CASES[name]
    answer = make_answer()
    check_rows(read_rows(query, answer), VOCABULARY)
    refused = 0
    for path in paths_in(answer):
        for value in JUNK:
            try:
                rows = read_rows(query, replace_at(answer, path, value))
                check_rows(rows, VOCABULARY)
            except Corrupt:
                refused += 1
                continue
            assert rows.head_ids is not None
            assert rows.head_ids.shape == (ROWS, K)
            assert np.exp(rows.head_logprobs).sum(axis=1).max() < 1.001
    assert refused > len(JUNK)
