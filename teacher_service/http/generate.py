"""`POST /generate` with `return_logprob`, as SGLang answers it: slime asks it.

A log-prob is [NATS, ID, null]. The first scored token of the answer has null for its log-prob, as
in SGLang: `logprob_start_len` counts the tokens before it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.base import EngineInfo
from teacher_service.http.asked import (
    Fields,
    query_of,
    read_fields,
    require,
    require_start,
    require_temperature,
    token_lists,
)
from teacher_service.http.json_text import integers, joined, literal, logprobs
from teacher_service.serving.validation import RequestLimits

_PIECE_ENTRIES = 8192
_NAMES = {
    "top_k": "top_logprobs_num",
    "head_ids": "token_ids_logprob",
    "start": "logprob_start_len",
}


_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _Sampling(Fields):
    max_new_tokens: int | None = None
    temperature: float | None = None
    skip_special_tokens: bool = True  # of generated text, and there is none


class _Fields(Fields):
    input_ids: Any
    sampling_params: _Sampling = _Sampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: _Id = 0
    token_ids_logprob: list[_Id] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a request; the queries that it needs are in `heads`, by the answer's name."""

    token_ids: NDArray[np.int32]
    start: int  # the first scored token
    heads: dict[str, ScoreQuery]


@dataclass(frozen=True)
class Generation:
    """A request to /generate that generates nothing. `several`: it has a list of sequences."""

    sequences: Sequence[_Sequence]
    several: bool

    @property
    def queries(self) -> Sequence[ScoreQuery]:
        """The sequences to score, one with top_logprobs_num and token_ids_logprob twice."""
        return [query for one in self.sequences for query in one.heads.values()]

    def text(self, blocks: Sequence[RowBlock], by: EngineInfo) -> Iterator[bytes]:
        """Yield the answer: an object for each sequence, in a list if the request has a list."""
        rest = iter(blocks)
        yield b"[" * self.several
        for index, sequence in enumerate(self.sequences):
            yield b"," * (index > 0)
            yield from _object(sequence, {name: next(rest) for name in sequence.heads}, by)
        yield b"]" * self.several


def _object(sequence: _Sequence, blocks: dict[str, RowBlock], by: EngineInfo) -> Iterator[bytes]:
    tokens = len(sequence.token_ids)
    about = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(by.version),
    }
    yield b'{"text":"","output_ids":[],"meta_info":' + json.dumps(about)[:-1].encode()
    first_block = next(iter(blocks.values()))
    scored = sequence.token_ids[sequence.start :]
    yield b',"input_token_logprobs":[[null,%d,null]' % sequence.token_ids[sequence.start - 1]
    for rows in _pieces(len(scored), 1):
        yield _triples(scored[rows], first_block.token_logprobs[rows])
    yield b'],"output_token_logprobs":[]'
    for name, block in blocks.items():
        if not name:
            continue  # only the tokens were asked for
        chosen = sequence.heads[name].head_ids
        ids = block.head_ids if chosen is None else chosen
        assert ids is not None
        yield b',"output_%s":[],"input_%s":[null' % (name.encode(), name.encode())
        for rows in _pieces(len(scored), block.k):
            yield _lists(ids[rows], block.head_logprobs[rows])
        yield b"]"
    yield b"}}"


def _pieces(rows: int, entries: int) -> Iterator[slice]:
    step = max(1, _PIECE_ENTRIES // entries)
    return (slice(first, first + step) for first in range(0, rows, step))


def _triples(ids: NDArray[np.int32], values: NDArray[np.float32]) -> bytes:
    """Return `,[NATS,ID,null]` for each row."""
    parts = [literal(b",["), *logprobs(values), literal(b","), integers(ids), literal(b",null]")]
    return joined(ids.shape, parts)


def _lists(ids: NDArray[np.int32], values: NDArray[np.floating[Any]]) -> bytes:
    """Return `,[[NATS,ID,null],...]` for each row."""
    opens = np.zeros(ids.shape, bool)
    opens[:, 0] = True
    parts = [
        literal(b"],[[", opens),
        literal(b",[", ~opens),
        *logprobs(values),
        literal(b","),
        integers(ids),
        literal(b",null]"),
    ]
    # The first row ends none before it.
    return b"," + joined(ids.shape, parts)[2:] + b"]"


def read_generation(body: bytes, limits: RequestLimits) -> Generation:
    """Parse and check a request to /generate. Raises InvalidInput."""
    asked = read_fields(body, _Fields)
    sampling = asked.sampling_params
    require(sampling.max_new_tokens, (0,), "sampling_params.max_new_tokens")
    require_temperature(sampling.temperature, "sampling_params.temperature")
    require(asked.return_logprob, (True,), "return_logprob", "this teacher answers log-probs only")
    require(asked.stream, (False,), "stream", "the answer is sent when all rows are there")
    require(
        asked.return_text_in_logprobs, (False,), "return_text_in_logprobs", "tokens are ids here"
    )
    sequences = [
        _Sequence(ids, asked.logprob_start_len + 1, _heads(ids, field, asked, limits))
        for field, ids in token_lists(asked.input_ids, "input_ids")
    ]
    return Generation(sequences, isinstance(asked.input_ids[0], list))


def _heads(
    ids: NDArray[np.int32], field: str, asked: _Fields, limits: RequestLimits
) -> dict[str, ScoreQuery]:
    require_start(asked.logprob_start_len, ids, "logprob_start_len")
    names = {**_NAMES, "token_ids": field}
    start = asked.logprob_start_len + 1
    heads = {}
    if asked.top_logprobs_num:
        top_k = asked.top_logprobs_num
        heads["top_logprobs"] = query_of(ids, limits, names=names, start=start, top_k=top_k)
    if asked.token_ids_logprob is not None:
        rows = max(1, len(ids) - start)
        chosen = np.tile(np.array(asked.token_ids_logprob, "<i4"), (rows, 1))
        heads["token_ids_logprobs"] = query_of(
            ids, limits, names=names, start=start, head_ids=chosen
        )
    return heads or {"": query_of(ids, limits, names=names, start=start, top_k=1)}
