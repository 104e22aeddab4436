"""Encodes queries for vLLM's worker process, and decodes the results that it returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, error_of
from protos.rows.codec import RowBlock, decode_rows, encode_rows


def encode_query(query: ScoreQuery) -> dict[str, Any]:
    """Encode `query` as plain values and bytes, which is all that a vLLM request can carry."""
    head_ids = query.head_ids
    return {
        "token_ids": query.token_ids.astype("<i4").tobytes(),
        "start": query.start,
        "top_k": query.top_k,
        "head_ids": None if head_ids is None else head_ids.astype("<i4").tobytes(),
        "temperature": query.temperature,
        "tail_samples": query.tail_samples,
        "seed": query.seed,
    }


def decode_query(fields: Mapping[str, Any]) -> ScoreQuery:
    """Return the query that `encode_query` encoded."""
    token_ids = np.frombuffer(fields["token_ids"], "<i4")
    head_ids = None
    if fields["head_ids"] is not None:
        rows = len(token_ids) - fields["start"]
        head_ids = np.frombuffer(fields["head_ids"], "<i4").reshape(rows, -1)
    others = {name: fields[name] for name in fields.keys() - {"token_ids", "head_ids"}}
    return ScoreQuery(token_ids, head_ids=head_ids, **others)


def part_of(query: ScoreQuery, first: int, end: int) -> ScoreQuery:
    """Return a query for rows [first, end) of `query`; both are positions in the sequence."""
    head_ids = query.head_ids
    if head_ids is not None:
        head_ids = head_ids[first - query.start : end - query.start]
    return replace(query, token_ids=query.token_ids[:end], start=first, head_ids=head_ids)


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
    return decode_rows(raw)
