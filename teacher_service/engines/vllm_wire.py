"""Encodes queries for vLLM's worker process, and decodes the results that it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, error_of
from protos.rows.codec import RowBlock, decode_rows, encode_rows

# The request field for the scheduler: the maximum tokens of a step (0: the engine's own limit), and
# whether the sender waits for this query alone; see QuerySchedule.
PACE = "pace"
# The fields of a query with ids that the student chose, per row.
_CHOSEN_ID_FIELDS = ("head_ids", "draw_ids")


def encode_query(query: ScoreQuery) -> dict[str, Any]:
    """Encode `query` as plain values and bytes, which is all that a vLLM request can carry."""
    return {
        "token_ids": query.token_ids.astype("<i4").tobytes(),
        "start": query.start,
        "top_k": query.top_k,
        "head_ids": _encode_ids(query.head_ids),
        "draw_ids": _encode_ids(query.draw_ids),
        "temperature": query.temperature,
        "tail_samples": query.tail_samples,
        "seed": query.seed,
        "vocab_size": query.vocab_size,
        "adapter": query.adapter,
    }


def decode_query(fields: Mapping[str, Any]) -> ScoreQuery:
    """Return the query that `encode_query` encoded."""
    token_ids = np.frombuffer(fields["token_ids"], "<i4")
    rows = len(token_ids) - fields["start"]
    chosen_ids: dict[str, Any] = {
        name: np.frombuffer(fields[name], "<i4").reshape(rows, -1)
        for name in _CHOSEN_ID_FIELDS
        if fields[name] is not None
    }
    other_fields = {
        name: fields[name] for name in fields.keys() - {"token_ids", PACE, *_CHOSEN_ID_FIELDS}
    }
    return ScoreQuery(token_ids, **chosen_ids, **other_fields)


def slice_query(query: ScoreQuery, first: int, end: int) -> ScoreQuery:
    """Return a query for rows [first, end) of `query`; both are positions in the sequence."""
    rows = slice(first - query.start, end - query.start)
    chosen_ids = {
        name: ids[rows] for name in _CHOSEN_ID_FIELDS if (ids := getattr(query, name)) is not None
    }
    return replace(query, token_ids=query.token_ids[:end], start=first, **chosen_ids)


def _encode_ids(ids: NDArray[np.int32] | None) -> bytes | None:
    return None if ids is None else ids.astype("<i4").tobytes()


def encode_answer(answer: RowBlock | DistillError) -> Tensor:
    """Encode a result as uint8 [n]: rows with float32 log-probs, or an error as JSON.

    A caller whose query has head ids sets `head_ids` of the rows to None, to avoid sending them.
    """
    if isinstance(answer, RowBlock):
        data = encode_rows(answer, f32=True)
    else:
        fault = {"message": answer.message, "field": answer.field, "hint": answer.hint}
        data = json.dumps({"code": answer.code, **fault}).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_answer(data: Tensor) -> RowBlock | DistillError:
    """Return the rows or the error that `encode_answer` encoded; an error is not raised."""
    raw = data.numpy().data
    if raw[0] == ord("{"):
        return error_of(**json.loads(bytes(raw)))
    return decode_rows(raw, len(raw))
