"""From a request's bytes to a query that no engine can choke on. Done before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import MAX_TAIL_SAMPLES, ScoreQuery
from protos import teacher_pb2
from protos.errors import InvalidInput

# It comes back with every chunk, which must stay far below the largest message.
MAX_REQUEST_ID_CHARS = 200


@dataclass(frozen=True)
class Limits:
    """What this teacher accepts: ids below vocab_size, sequences of 2..max_length tokens, k of
    1..max_top_k (0 where there are tail samples).
    """

    vocab_size: int
    max_length: int
    max_top_k: int


def parse_request(request: teacher_pb2.ScoreRequest, limits: Limits) -> ScoreQuery:
    """The query of a request; InvalidInput names the field, its index and the remedy."""
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        _refuse("request_id", f"longer than {MAX_REQUEST_ID_CHARS} characters", "use a number")
    token_ids = _ids(request.token_ids, "token_ids", limits)
    length, start = len(token_ids), request.start
    if not 2 <= length <= limits.max_length:
        _refuse(
            "token_ids",
            f"a sequence has 2 to {limits.max_length} tokens, got {length}",
            "cut the sequence, or use a teacher with a longer context",
        )
    if not 1 <= start < length:
        _refuse(
            "start",
            f"must be 1 to {length - 1} for {length} tokens, got {start}",
            "row t scores token t given the tokens before it; the first token has none",
        )
    if request.next_position and not start <= request.next_position < length:
        _refuse(
            "next_position",
            f"must be 0 or {start} to {length - 1}, got {request.next_position}",
            "ask for the first row that is missing",
        )
    if not (math.isfinite(request.temperature) and request.temperature > 0):
        _refuse("temperature", f"must be finite and above 0, got {request.temperature}", "use 1.0")
    if request.tail_samples > MAX_TAIL_SAMPLES:
        _refuse(
            "tail_samples",
            f"must be 0 to {MAX_TAIL_SAMPLES}, got {request.tail_samples}",
            "the spread of a loss falls with the root of their number",
        )
    f32 = request.logprob_format == teacher_pb2.LOGPROB_FORMAT_F32
    top_k, head_ids = _head(request, length - start, limits)
    return ScoreQuery(
        token_ids,
        start,
        top_k,
        head_ids,
        request.temperature,
        f32,
        request.tail_samples,
        request.sample_seed,
    )


def _head(
    request: teacher_pb2.ScoreRequest, rows: int, limits: Limits
) -> tuple[int | None, NDArray[np.int32] | None]:
    match request.WhichOneof("head"):
        case "top_k":
            if request.top_k or not request.tail_samples:
                _require_k(request.top_k, "top_k", limits)
            return request.top_k, None
        case "head_ids":
            flat = _ids(request.head_ids, "head_ids", limits)
            if flat.size == 0 or flat.size % rows:
                _refuse(
                    "head_ids",
                    f"{flat.size} ids do not fill {rows} rows",
                    "send [length - start, k] ids, the same k for every row",
                )
            _require_k(flat.size // rows, "head_ids", limits)
            head_ids = flat.reshape(rows, -1)
            _require_distinct(head_ids)
            return None, head_ids
        case _:
            _refuse("top_k", "neither top_k nor head_ids is given", "set one of them")


def _ids(data: bytes, field: str, limits: Limits) -> NDArray[np.int32]:
    if len(data) % 4:
        _refuse(field, f"{len(data)} bytes are not int32 numbers", "send little-endian int32")
    ids = np.frombuffer(data, "<i4")
    bad = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if bad.size:
        _refuse(
            f"{field}[{bad[0]}]",
            f"ids are 0 to {limits.vocab_size - 1}, got {ids[bad[0]]}",
            "student and teacher must share one vocabulary",
        )
    return ids


def _require_k(k: int, field: str, limits: Limits) -> None:
    if not 1 <= k <= limits.max_top_k:
        _refuse(
            field,
            f"k must be 1 to {limits.max_top_k}, got {k}",
            "ask for fewer head ids, or start the teacher with a larger --max-top-k",
        )


def _require_distinct(head_ids: NDArray[np.int32]) -> None:
    ordered = np.sort(head_ids, axis=1)
    repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if repeated.size:
        _refuse(
            f"head_ids[{repeated[0]}]",
            "an id occurs twice in this row",
            "send the distinct ids of a top-k",
        )


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidInput(message, field=field, hint=hint)
