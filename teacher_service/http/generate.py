"""`POST /generate` with `return_logprob`, in the format of SGLang, for slime.

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
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.http.json_text import (
    format_integers,
    format_literal,
    format_logprobs,
    join_parts,
)
from teacher_service.http.scoring_request import (
    Fields,
    build_query,
    read_fields,
    read_token_lists,
    require,
    require_start,
    require_temperature,
)
from teacher_service.serving.validation import RequestLimits

_PIECE_ENTRIES = 8192
_NAMES = {
    "top_k": "top_logprobs_num",
    "head_ids": "token_ids_logprob",
    "start": "logprob_start_len",
}


_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _GenerationSampling(Fields):
    max_new_tokens: int | None = None
    temperature: float | None = None
    skip_special_tokens: bool = True  # of generated text, and there is none


class _GenerationFields(Fields):
    input_ids: Any
    sampling_params: _GenerationSampling = _GenerationSampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: _Id = 0
    token_ids_logprob: list[_Id] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False


@dataclass(frozen=True)
class _ScoredSequence:
    """One sequence of a request; the queries that it needs are in `heads`, by the answer's name."""

    token_ids: NDArray[np.int32]
    start: int  # the first scored token
    heads: dict[str, ScoreQuery]


@dataclass(frozen=True)
class Generation:
    """A request to /generate that generates nothing. `is_list`: it has a list of sequences."""

    sequences: Sequence[_ScoredSequence]
    is_list: bool

    @property
    def queries(self) -> Sequence[ScoreQuery]:
        """The sequences to score, one with top_logprobs_num and token_ids_logprob twice."""
        return [query for sequence in self.sequences for query in sequence.heads.values()]

    def text(self, blocks: Sequence[RowBlock], info: ScoringEngineInfo) -> Iterator[bytes]:
        """Yield the answer: an object for each sequence, in a list if the request has a list."""
        block_iterator = iter(blocks)
        yield b"[" * self.is_list
        for index, sequence in enumerate(self.sequences):
            yield b"," * (index > 0)
            yield from _write_object(
                sequence, {name: next(block_iterator) for name in sequence.heads}, info
            )
        yield b"]" * self.is_list


def _write_object(
    sequence: _ScoredSequence, blocks: dict[str, RowBlock], info: ScoringEngineInfo
) -> Iterator[bytes]:
    tokens = len(sequence.token_ids)
    meta_info = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(info.version),
    }
    yield b'{"text":"","output_ids":[],"meta_info":' + json.dumps(meta_info)[:-1].encode()
    first_block = next(iter(blocks.values()))
    scored_ids = sequence.token_ids[sequence.start :]
    yield b',"input_token_logprobs":[[null,%d,null]' % sequence.token_ids[sequence.start - 1]
    for rows in _split_rows(len(scored_ids), 1):
        yield _write_triples(scored_ids[rows], first_block.token_logprobs[rows])
    yield b'],"output_token_logprobs":[]'
    for name, block in blocks.items():
        if not name:
            continue  # only the tokens were asked for
        given_ids = sequence.heads[name].head_ids
        ids = block.head_ids if given_ids is None else given_ids
        assert ids is not None
        yield b',"output_%s":[],"input_%s":[null' % (name.encode(), name.encode())
        for rows in _split_rows(len(scored_ids), block.k):
            yield _write_lists(ids[rows], block.head_logprobs[rows])
        yield b"]"
    yield b"}}"


def _split_rows(rows: int, entries: int) -> Iterator[slice]:
    step = max(1, _PIECE_ENTRIES // entries)
    return (slice(first, first + step) for first in range(0, rows, step))


def _write_triples(ids: NDArray[np.int32], values: NDArray[np.float32]) -> bytes:
    """Return `,[NATS,ID,null]` for each row."""
    parts = [
        format_literal(b",["),
        *format_logprobs(values),
        format_literal(b","),
        format_integers(ids),
        format_literal(b",null]"),
    ]
    return join_parts(ids.shape, parts)


def _write_lists(ids: NDArray[np.int32], values: NDArray[np.floating[Any]]) -> bytes:
    """Return `,[[NATS,ID,null],...]` for each row."""
    is_opening = np.zeros(ids.shape, bool)
    is_opening[:, 0] = True
    parts = [
        format_literal(b"],[[", is_opening),
        format_literal(b",[", ~is_opening),
        *format_logprobs(values),
        format_literal(b","),
        format_integers(ids),
        format_literal(b",null]"),
    ]
    # No row precedes the first one.
    return b"," + join_parts(ids.shape, parts)[2:] + b"]"


def read_generation(body: bytes, limits: RequestLimits) -> Generation:
    """Parse and check a request to /generate. Raises InvalidInput."""
    fields = read_fields(body, _GenerationFields)
    sampling = fields.sampling_params
    require(sampling.max_new_tokens, (0,), "sampling_params.max_new_tokens")
    require_temperature(sampling.temperature, "sampling_params.temperature")
    require(fields.return_logprob, (True,), "return_logprob", "this teacher answers log-probs only")
    require(fields.stream, (False,), "stream", "the answer is sent when all rows are there")
    require(
        fields.return_text_in_logprobs, (False,), "return_text_in_logprobs", "tokens are ids here"
    )
    sequences = [
        _ScoredSequence(
            ids, fields.logprob_start_len + 1, _build_head_queries(ids, field, fields, limits)
        )
        for field, ids in read_token_lists(fields.input_ids, "input_ids")
    ]
    return Generation(sequences, isinstance(fields.input_ids[0], list))


def _build_head_queries(
    ids: NDArray[np.int32], field: str, fields: _GenerationFields, limits: RequestLimits
) -> dict[str, ScoreQuery]:
    require_start(fields.logprob_start_len, ids, "logprob_start_len")
    names = {**_NAMES, "token_ids": field}
    start = fields.logprob_start_len + 1
    queries = {}
    if fields.top_logprobs_num:
        top_k = fields.top_logprobs_num
        queries["top_logprobs"] = build_query(ids, limits, names=names, start=start, top_k=top_k)
    if fields.token_ids_logprob is not None:
        rows = max(1, len(ids) - start)
        head_ids = np.tile(np.array(fields.token_ids_logprob, "<i4"), (rows, 1))
        queries["token_ids_logprobs"] = build_query(
            ids, limits, names=names, start=start, head_ids=head_ids
        )
    return queries or {"": build_query(ids, limits, names=names, start=start, top_k=1)}
