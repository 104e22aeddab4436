"""`POST /v1/completions` with `prompt_logprobs`, in the format of vLLM, for TRL and ms-swift.

Each position of a prompt after the first has an object of its token and of the teacher's k
likeliest ids, {"ID": {"logprob": NATS, "rank": R}}. If a token is not among these k ids, its rank
is written as k + 1, a lower bound of the rank, because rows do not contain the rank.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery, identity_of
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.http.scoring_request import (
    Fields,
    build_query,
    find_adapter,
    read_fields,
    read_token_lists,
    refuse,
    require,
    require_temperature,
)
from teacher_service.serving.validation import RequestLimits

# The number of decimals of a log-prob. The rounding error of 5e-10 nats is below the rounding error
# of float32 for log-probs under -0.016. For larger log-probs, only the absolute error matters.
DECIMALS = 9
# vLLM writes a log-prob of -inf as this number, because JSON has no infinity.
LOWEST_LOGPROB = -9999.0
_ZERO = ord("0")

Mask = NDArray[np.bool_]

_PIECE_ENTRIES = 8192


class Part(NamedTuple):
    """A part of the text of each entry: an array of characters, and a mask of the used ones.

    - chars: ASCII codes, uint8 [..., width]; an array [width] is the same text for every entry.
    - mask: bool [..., width], True for a character that is in the text.

    Both arrays broadcast over the entries.
    """

    chars: NDArray[np.uint8]
    mask: Mask


def format_literal(text: bytes, mask: Mask | None = None) -> Part:
    """Return a part with the text `text` for every entry, or only for entries in `mask` [...]."""
    chars = np.frombuffer(text, np.uint8)
    return Part(chars, np.ones(len(chars), bool) if mask is None else mask[..., None])


def format_integers(values: NDArray[Any]) -> Part:
    """Return a part with the digits of `values` [...], without leading zeros.

    The values are integers from 0 to 10^9 - 1.
    """
    width = len(str(int(values.max(initial=0))))
    chars = _format_digits(values, width)
    is_shown = values[..., None] >= 10 ** np.arange(width - 1, -1, -1)
    is_shown[..., -1] = True
    return Part(chars, is_shown)


def format_logprobs(values: NDArray[np.floating[Any]]) -> tuple[Part, ...]:
    """Return the parts of log-probs of shape [...], in nats, as -I.FFFFFFFFF.

    Values below LOWEST_LOGPROB are written as LOWEST_LOGPROB. Values above 0, which rounding can
    cause, are written as -0.
    """
    scaled = np.clip(values.astype(np.float64), LOWEST_LOGPROB, 0.0) * -(10.0**DECIMALS)
    integer_part, fraction = np.divmod(np.rint(scaled).astype(np.int64), 10**DECIMALS)
    digits = Part(_format_digits(fraction, DECIMALS), np.ones(DECIMALS, bool))
    return format_literal(b"-"), format_integers(integer_part), format_literal(b"."), digits


def join_parts(shape: tuple[int, ...], parts: Sequence[Part]) -> bytes:
    """Return the text of entries [*shape], in order; each entry is the concatenation of its parts.

    One selection in numpy joins numbers of different lengths, without a Python object per number.
    """
    chars = _concatenate_columns(shape, [part.chars for part in parts], parts)
    mask = _concatenate_columns(shape, [part.mask for part in parts], parts)
    text: bytes = chars.reshape(-1)[mask.reshape(-1)].tobytes()
    return text


def _concatenate_columns(
    shape: tuple[int, ...], columns: Sequence[NDArray[Any]], parts: Sequence[Part]
) -> NDArray[Any]:
    """Return the columns of all parts, [*shape, width].

    Columns that all entries share are written first, in one assignment, which is fast.
    """
    widths = [part.chars.shape[-1] for part in parts]
    ends = np.cumsum(widths).tolist()
    table = np.empty((*shape, ends[-1]), columns[0].dtype)
    shared_columns = [
        column if column.ndim == 1 else np.zeros(width, column.dtype)
        for column, width in zip(columns, widths, strict=True)
    ]
    table[...] = np.concatenate(shared_columns)
    for column, width, end in zip(columns, widths, ends, strict=True):
        if column.ndim > 1:
            table[..., end - width : end] = column
    return table


def _format_digits(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """Return the last `width` (at most 9) decimal digits of each value, uint8 [..., width]."""
    digits = np.empty((*values.shape, width), np.uint8)
    remaining_digits = values.astype(np.uint32)
    for place in range(width - 1, -1, -1):
        shifted = remaining_digits // 10
        digits[..., place] = remaining_digits - 10 * shifted + _ZERO
        remaining_digits = shifted
    return digits


class _CompletionFields(Fields):
    prompt: Any
    model: str | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int = 1
    echo: bool = False
    stream: bool = False
    # Sampling options, accepted and ignored: nothing is sampled.
    seed: int | None = None
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Completions:
    """A request to /v1/completions: prompts whose every token is scored."""

    queries: Sequence[ScoreQuery]
    k: int

    def text(self, blocks: Sequence[RowBlock], info: ScoringEngineInfo) -> Iterator[bytes]:
        """Yield the answer: one choice for each prompt, without generated tokens."""
        adapter = self.queries[0].adapter
        header = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": adapter or info.model,
            "system_fingerprint": identity_of(info.fingerprint_for(adapter), info.version),
        }
        yield json.dumps(header)[:-1].encode() + b', "choices": ['
        for index, (query, block) in enumerate(zip(self.queries, blocks, strict=True)):
            choice = {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
            yield b", " * (index > 0) + json.dumps(choice)[:-1].encode()
            yield b', "prompt_logprobs": [null'
            step = max(1, _PIECE_ENTRIES // (self.k + 1))
            for first in range(0, query.rows, step):
                last = min(first + step, query.rows)
                ids = query.token_ids[query.start + first : query.start + last]
                yield write_prompt_logprobs(block.slice(first, last), ids, self.k)
            yield b"]}"
        tokens = sum(len(query.token_ids) for query in self.queries)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        yield b'], "usage": ' + json.dumps(usage).encode() + b"}"


def read_completions(body: bytes, limits: RequestLimits, info: ScoringEngineInfo) -> Completions:
    """Parse and check a request to /v1/completions.

    Raises InvalidInput, and NotFound for another model's name.
    """
    fields = read_fields(body, _CompletionFields)
    adapter = find_adapter(fields.model, info)
    require(fields.max_tokens, (1, 0), "max_tokens")
    require(fields.n, (1,), "n")
    require(fields.stream, (False,), "stream", "the answer is sent when all rows are there")
    require(fields.echo, (False,), "echo", "prompt_logprobs has the log-probs of the prompt")
    require_temperature(fields.temperature, "temperature")
    k = fields.prompt_logprobs
    if k is None or not 0 <= k <= limits.max_top_k:
        refuse(
            "prompt_logprobs",
            f"must be 0 to {limits.max_top_k}, " + ("it is absent" if k is None else f"got {k}"),
            "request fewer ids, or start the teacher with a larger --max-top-k",
        )
    queries = [
        # A row has at least one head id.
        build_query(ids, limits, top_k=max(k, 1), names={"token_ids": field}, adapter=adapter)
        for field, ids in read_token_lists(fields.prompt, "prompt")
    ]
    return Completions(queries, k)


def write_prompt_logprobs(block: RowBlock, token_ids: NDArray[np.int32], k: int) -> bytes:
    """Return `,{...}` for each row: the row's token first, then the other ids of the k head ids."""
    assert block.head_ids is not None
    is_token = block.head_ids == token_ids[:, None]
    ids = np.concatenate([token_ids[:, None], block.head_ids[:, :k]], axis=1)
    values = np.concatenate([block.token_logprobs[:, None], block.head_logprobs[:, :k]], axis=1)
    ranks = np.broadcast_to(np.arange(k + 1), ids.shape).copy()
    ranks[:, 0] = np.where(is_token.any(1), is_token.argmax(1), block.k) + 1
    is_first, is_written = np.zeros(ids.shape, bool), np.ones(ids.shape, bool)
    is_first[:, 0] = True
    is_written[:, 1:] = ~is_token[:, :k]
    is_opening = is_first[is_written]
    parts = [
        format_literal(b"},{", is_opening),
        format_literal(b",", ~is_opening),
        format_literal(b'"'),
        format_integers(ids[is_written]),
        format_literal(b'":{"logprob":'),
        *format_logprobs(values[is_written]),
        format_literal(b',"rank":'),
        format_integers(ranks[is_written]),
        format_literal(b"}"),
    ]
    # The first entry has no row before it, so its `},` is cut off.
    return b"," + join_parts(is_opening.shape, parts)[2:] + b"}"
