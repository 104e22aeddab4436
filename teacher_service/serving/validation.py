"""Validates Score requests before they are queued, so that engines see only valid queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import MAX_TAIL_DRAWS, MAX_TAIL_SAMPLES, ScoreQuery
from protos import teacher_pb2
from protos.errors import InvalidInput

# Every chunk repeats the request id, and chunks must stay far below the message limit.
MAX_REQUEST_ID_CHARS = 200


@dataclass(frozen=True)
class RequestLimits:
    """The limits of this teacher on requests.

    - Token ids are 0 to vocab_size - 1.
    - A sequence has 2 to max_length tokens.
    - k, the number of head ids per row, is 1 to max_top_k. A request sets k by `top_k`, or sends k
      `head_ids` per row. `top_k` may be 0 if the request asks for tail samples: ids that the
      teacher draws from outside the head.
    - `adapters`: the names of the adapters that a request may select.
    - `placeholder`: the token that stands for an image; None: the teacher reads no images.
    """

    vocab_size: int
    max_length: int
    max_top_k: int
    adapters: frozenset[str] = frozenset()
    placeholder: int | None = None


def parse_request(request: teacher_pb2.ScoreRequest, limits: RequestLimits) -> ScoreQuery:
    """Return the validated query of `request`.

    Raises InvalidInput with the field, the index of a bad id, and a hint.
    """
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        _refuse(
            "request_id",
            f"must be at most {MAX_REQUEST_ID_CHARS} characters, got {len(request.request_id)}",
            "use a number",
        )
    if request.adapter and request.adapter not in limits.adapters:
        refuse_adapter(request.adapter, limits.adapters)
    limits, vocab_size = _narrow_limits(request, limits)
    token_ids = _parse_ids(request.token_ids, "token_ids", limits)
    length, start = len(token_ids), request.start
    if not 2 <= length <= limits.max_length:
        _refuse(
            "token_ids",
            f"a sequence must have 2 to {limits.max_length} tokens, got {length}",
            "shorten the sequence, or use a teacher with a longer context",
        )
    if not 1 <= start < length:
        _refuse(
            "start",
            f"must be 1 to {length - 1} for {length} tokens, got {start}",
            "row t scores token t given the tokens before it, so the first row is row 1",
        )
    if request.next_position and not start <= request.next_position < length:
        _refuse(
            "next_position",
            f"must be 0 or {start} to {length - 1}, got {request.next_position}",
            "set the field to the position of the first missing row",
        )
    if request.tail_samples > MAX_TAIL_SAMPLES:
        _refuse(
            "tail_samples",
            f"must be 0 to {MAX_TAIL_SAMPLES}, got {request.tail_samples}",
            "use fewer; the standard deviation falls only with the square root of their number",
        )
    f32 = request.logprob_format == teacher_pb2.LOGPROB_FORMAT_F32
    top_k, head_ids = _parse_head(request, length - start, limits)
    return ScoreQuery(
        token_ids,
        start,
        top_k,
        head_ids,
        request.temperature,
        f32,
        request.tail_samples,
        request.sample_seed,
        _parse_draws(request, length - start, limits),
        vocab_size,
        request.adapter,
        _parse_images(request, token_ids, limits),
    )


def refuse_adapter(name: str, adapter_names: Iterable[str]) -> NoReturn:
    """Raise InvalidInput for the adapter `name`, which this teacher does not have."""
    names = ", ".join(sorted(adapter_names))
    _refuse(
        "adapter",
        f"this teacher has no adapter {name!r}" + (f"; its adapters are {names}" if names else ""),
        f"start the teacher with --adapter {name}=DIR",
    )


def _narrow_limits(
    request: teacher_pb2.ScoreRequest, limits: RequestLimits
) -> tuple[RequestLimits, int | None]:
    """Return the limits for the ids of the request, and the query's `vocab_size`.

    If the request's number of logits is the number of all logits, the result is the same as without
    a number. So both requests have the same cache key.
    """
    size = request.vocab_size or limits.vocab_size
    if size > limits.vocab_size:
        _refuse(
            "vocab_size",
            f"must be at most {limits.vocab_size}, the number of logits, got {size}",
            "remove the field, or set the number of logits that teacher and student have in common",
        )
    narrowed_limits = replace(limits, vocab_size=size, max_top_k=min(limits.max_top_k, size))
    return narrowed_limits, None if size == limits.vocab_size else size


def _parse_head(
    request: teacher_pb2.ScoreRequest, rows: int, limits: RequestLimits
) -> tuple[int | None, NDArray[np.int32] | None]:
    match request.WhichOneof("head"):
        case "top_k":
            if request.top_k or not request.tail_samples:
                _require_k(request.top_k, "top_k", limits)
            return request.top_k, None
        case "head_ids":
            flat = _parse_ids(request.head_ids, "head_ids", limits)
            if flat.size == 0 or flat.size % rows:
                _refuse(
                    "head_ids",
                    f"{flat.size} ids cannot be divided into {rows} rows",
                    "send [length - start, k] ids, the same k for every row",
                )
            _require_k(flat.size // rows, "head_ids", limits)
            head_ids = flat.reshape(rows, -1)
            _require_distinct(head_ids)
            return None, head_ids
        case _:
            _refuse("top_k", "neither top_k nor head_ids is given", "set one of the two fields")


def _parse_draws(
    request: teacher_pb2.ScoreRequest, rows: int, limits: RequestLimits
) -> NDArray[np.int32] | None:
    if not request.draw_ids:
        return None
    flat = _parse_ids(request.draw_ids, "draw_ids", limits)
    if flat.size % rows or not 1 <= flat.size // rows <= MAX_TAIL_DRAWS:
        _refuse(
            "draw_ids",
            f"{flat.size} ids for {rows} rows",
            f"send [length - start, M] ids, M from 1 to {MAX_TAIL_DRAWS}, the same for every row",
        )
    return flat.reshape(rows, -1)


def _parse_images(
    request: teacher_pb2.ScoreRequest, token_ids: NDArray[np.int32], limits: RequestLimits
) -> tuple[bytes, ...]:
    """Return the images of the request. Each image needs one placeholder token before `start`."""
    sizes, data = request.image_sizes, request.images
    if limits.placeholder is None:
        if sizes or data:
            _refuse(
                "images",
                "this teacher reads no images",
                "use a teacher whose model reads images, with --engine hf",
            )
        return ()
    if sum(sizes) != len(data) or 0 in sizes:
        _refuse(
            "image_sizes",
            f"the {len(sizes)} sizes have the sum {sum(sizes)}, but images has {len(data)} bytes",
            "send the length of each image in bytes",
        )
    placeholders = np.flatnonzero(token_ids == limits.placeholder)
    prompt_placeholders = placeholders[placeholders < request.start]
    if len(prompt_placeholders) != len(sizes):
        _refuse(
            "images",
            f"the tokens before `start` have {len(prompt_placeholders)} image placeholders (id"
            f" {limits.placeholder}), but the request has {len(sizes)} images",
            "send one placeholder token for each image",
        )
    if (np.diff(prompt_placeholders) == 1).any():
        _refuse(
            "token_ids",
            "has two image placeholders in a row, which the model would read as one image",
            "put other tokens between two images, as the chat template does",
        )
    if sizes and len(prompt_placeholders) != len(placeholders):
        _refuse(
            f"token_ids[{placeholders[len(prompt_placeholders)]}]",
            "is an image placeholder at or after `start`, but rows are of text only",
            "put images before the scored tokens",
        )
    ends = np.cumsum([0, *sizes])
    return tuple(data[first:end] for first, end in pairwise(ends.tolist()))


def _parse_ids(data: bytes, field: str, limits: RequestLimits) -> NDArray[np.int32]:
    if len(data) % 4:
        _refuse(
            field, f"{len(data)} bytes is not a multiple of 4", "send little-endian int32 values"
        )
    ids = np.frombuffer(data, "<i4")
    invalid_places = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if invalid_places.size:
        _refuse(
            f"{field}[{invalid_places[0]}]",
            f"must be 0 to {limits.vocab_size - 1}, got {ids[invalid_places[0]]}",
            "use a student and a teacher with the same vocabulary",
        )
    return ids


def _require_k(k: int, field: str, limits: RequestLimits) -> None:
    if not 1 <= k <= limits.max_top_k:
        _refuse(
            field,
            f"k must be 1 to {limits.max_top_k}, got {k}",
            "request fewer head ids, or start the teacher with a larger --max-top-k",
        )


def _require_distinct(head_ids: NDArray[np.int32]) -> None:
    sorted_ids = np.sort(head_ids, axis=1)
    repeated_rows = np.flatnonzero((sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1))
    if repeated_rows.size:
        _refuse(
            f"head_ids[{repeated_rows[0]}]",
            "this row has the same id twice",
            "send distinct head ids in each row",
        )


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidInput(message, field=field, hint=hint)
