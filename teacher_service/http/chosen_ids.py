"""`POST /inference/v1/generate` of vLLM 0.32: log-probs of ids that the client chooses per row.

Row i of `prompt_logprob_token_ids` [n, m] has the ids to score at the position of token
`prompt_logprob_start` + i + 1; the rows end with the last token. An id may be repeated in a row.
The response has the log-probs as one array, float32 [n, m], in numpy's format and base64.
"""

from __future__ import annotations

import base64
import io
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.teacher.query import MAX_TAIL_DRAWS, ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.http.scoring_request import (
    Fields,
    build_query,
    find_adapter,
    read_fields,
    read_token_list,
    refuse,
    require,
    require_start,
    require_temperature,
)
from teacher_service.serving.validation import RequestLimits

_IDS = "sampling_params.prompt_logprob_token_ids"
_NAMES = {"token_ids": "token_ids", "head_ids": _IDS, "draw_ids": _IDS}
_PIECE_BYTES = 3 << 16  # base64 encodes three bytes as four characters


class _ChosenIdsSampling(Fields):
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int = Field(0, ge=0, lt=2**31)
    max_tokens: int | None = None
    temperature: float | None = None
    detokenize: bool = True  # concerns generated tokens, and there are none


class _ChosenIdsFields(Fields):
    token_ids: Any
    sampling_params: _ChosenIdsSampling
    model: str | None = None
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    stream: bool = False
    output_mode: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class ChosenIds:
    """A request for the log-probs of given ids, one or more per row.

    The first ids of each row are head ids, and must differ. The other ids are draws, and can
    repeat.
    """

    queries: Sequence[ScoreQuery]
    request_id: str

    def text(self, blocks: Sequence[RowBlock], info: ScoringEngineInfo) -> Iterator[bytes]:
        """Yield the parts of the JSON answer."""
        (query,), (block,) = self.queries, blocks
        tokens = len(query.token_ids)
        header = {
            "request_id": self.request_id,
            "created": int(time.time()),
            "model": query.adapter or info.model,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            "choices": [{"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": []}],
            "output_mode": "tokens",
        }
        yield json.dumps(header)[:-1].encode() + b', "prompt_token_id_logprobs": "'
        parts = [block.head_logprobs]
        if block.draw_logprobs is not None:
            parts.append(block.draw_logprobs)
        data = _encode_npy(np.concatenate(parts, axis=1).astype("<f4"))
        for first in range(0, len(data), _PIECE_BYTES):
            yield base64.b64encode(data[first : first + _PIECE_BYTES])
        yield b'"}'


def read_chosen_ids(body: bytes, limits: RequestLimits, info: ScoringEngineInfo) -> ChosenIds:
    """Parse and check a request to /inference/v1/generate.

    Raises InvalidInput, and NotFound for another model's name.
    """
    fields = read_fields(body, _ChosenIdsFields)
    sampling = fields.sampling_params
    adapter = find_adapter(fields.model, info)
    require(sampling.max_tokens, (1, 0), "sampling_params.max_tokens")
    require_temperature(sampling.temperature, "sampling_params.temperature")
    require(fields.stream, (False,), "stream", "the answer is sent when all rows are there")
    tokens = read_token_list(fields.token_ids, "token_ids")
    start_field = "sampling_params.prompt_logprob_start"
    require_start(sampling.prompt_logprob_start, tokens, start_field)
    start = sampling.prompt_logprob_start + 1
    ids = _read_id_rows(sampling.prompt_logprob_token_ids, max(1, len(tokens) - start))
    max_ids = min(limits.max_top_k, 1 + MAX_TAIL_DRAWS)
    if ids.shape[1] > max_ids:
        refuse(_IDS, f"a row has 1 to {max_ids} ids, got {ids.shape[1]}", "request fewer ids")
    draw_ids = ids[:, 1:] if ids.shape[1] > 1 else None
    query = build_query(
        tokens,
        limits,
        names=_NAMES,
        start=start,
        head_ids=ids[:, :1],
        draw_ids=draw_ids,
        adapter=adapter,
    )
    return ChosenIds([query], fields.request_id)


def _read_id_rows(value: Any, rows: int) -> NDArray[np.int32]:
    """Return the ids [rows, m] of a field. Raises InvalidInput if `value` is not such an array."""
    try:
        ids = np.array(value)
    except ValueError:  # rows of different lengths
        ids = np.array(None)
    if ids.ndim != 2 or ids.dtype.kind != "i" or len(ids) != rows or not ids.shape[1]:
        refuse(
            _IDS, f"must be {rows} lists of ids, all of one length", "send one list for each row"
        )
    return ids.clip(-1, 2**31 - 1).astype("<i4")


def _encode_npy(values: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=False)
    return file.getvalue()
