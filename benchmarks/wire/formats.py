"""The wire formats that are compared: this project's, and those of other servers, reimplemented.

Encoding starts from the data that each server holds after the forward pass, and decoding ends with
the data that its client returns. The peers hold one Python object per candidate, so the cost of
these objects is included.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pydantic
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from protos.rows.codec import RowBlock, decode_rows, encode_rows


@dataclass(frozen=True)
class Logprob:
    """vLLM's Logprob: one per entry of `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Format:
    """One wire format. `hold` is untimed: it makes the data that the server holds beforehand."""

    name: str
    hold: Callable[[RowBlock], Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def rows_as_they_are(block: RowBlock) -> RowBlock:
    return block


def to_dictionaries(block: RowBlock) -> list[dict[int, Logprob]]:
    """vLLM's `prompt_logprobs`: one object per candidate."""
    return [
        {
            token: Logprob(logprob, rank, f"tok{token}")
            for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
        }
        for ids, logprobs in zip(block.head_ids.tolist(), block.head_logprobs.tolist(), strict=True)
    ]


def to_nested_lists(block: RowBlock) -> tuple[list[list[float]], list[list[int]]]:
    """SGLang's `input_top_logprobs_val` and `_idx`."""
    return block.head_logprobs.tolist(), block.head_ids.tolist()


class Completion(pydantic.BaseModel):
    """The part of vLLM's response that matters here."""

    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def vllm_json(candidates: list[dict[int, Logprob]]) -> bytes:
    """{token id: {logprob, rank, decoded_token}}, as `JSONResponse(response.model_dump())` does."""
    response = Completion(prompt_logprobs=candidates)
    return json.dumps(response.model_dump(), separators=(",", ":")).encode()


def vllm_arrays(data: bytes) -> tuple[Any, Any]:
    rows = json.loads(data)["prompt_logprobs"]
    ids = np.array([[int(token) for token in row] for row in rows], np.int32)
    logprobs = np.array([[item["logprob"] for item in row.values()] for row in rows], np.float32)
    return ids, logprobs


def trl_json(candidates: list[dict[int, Logprob]]) -> bytes:
    """TRL's `response_format="json"`: nested lists by rank."""
    ids, logprobs = [], []
    for row in candidates:
        ordered = sorted(row.items(), key=lambda pair: pair[1].rank)
        ids.append([token for token, _ in ordered])
        logprobs.append([None if math.isnan(i.logprob) else i.logprob for _, i in ordered])
    return json.dumps({"logprobs": [logprobs], "logprob_token_ids": [ids]}).encode()


def trl_json_lists(data: bytes) -> Any:
    response = json.loads(data)
    return response["logprobs"], response["logprob_token_ids"]


def trl_base64(candidates: list[dict[int, Logprob]]) -> bytes:
    """TRL's `response_format="binary"` (1.2): padded arrays, filled one candidate at a time."""
    k = len(candidates[0])
    logprobs = np.full((1, len(candidates), k), float("-inf"), np.float32)
    ids = np.zeros((1, len(candidates), k), np.int32)
    actual = np.full((1, len(candidates), 1), float("-inf"), np.float32)
    actual_ids = np.zeros((1, len(candidates), 1), np.int32)
    for t, row in enumerate(candidates):
        token = next(iter(row))
        if not math.isnan(row[token].logprob):
            actual[0, t, 0] = row[token].logprob
        actual_ids[0, t, 0] = token
        ordered = sorted(row.items(), key=lambda pair: pair[1].rank)
        for column, (token, item) in enumerate(ordered[:k]):
            if not math.isnan(item.logprob):
                logprobs[0, t, column] = item.logprob
            ids[0, t, column] = token
    return orjson.dumps(
        {
            "logprobs_b64": _encode_base64(logprobs),
            "token_ids_b64": _encode_base64(ids),
            "actual_logprobs_b64": _encode_base64(actual),
            "actual_token_ids_b64": _encode_base64(actual_ids),
            "shape": [1, len(candidates), k],
            "completion_lengths": [len(candidates)],
        }
    )


def trl_base64_lists(data: bytes) -> Any:
    response = json.loads(data)
    shape = response["shape"]
    token_shape = [shape[0], shape[1], 1]
    return [
        np.frombuffer(base64.b64decode(response[name]), dtype).reshape(array_shape)[0].tolist()
        for name, dtype, array_shape in (
            ("logprobs_b64", np.float32, shape),
            ("token_ids_b64", np.int32, shape),
            ("actual_logprobs_b64", np.float32, token_shape),
            ("actual_token_ids_b64", np.int32, token_shape),
        )
    ]


def sglang_base64(candidates: tuple[list[list[float]], list[list[int]]]) -> bytes:
    """SGLang's `return_flat_raw_top_logprobs_b64`: flat arrays made from its nested lists."""
    return flat_base64(
        RowBlock(
            np.asarray(candidates[1], np.int32), np.asarray(candidates[0], np.float32), _NONE, _NONE
        )
    )


def flat_base64(block: RowBlock) -> bytes:
    """The same format for a server that holds arrays instead of lists."""
    return orjson.dumps(
        {
            "input_top_logprobs_val_flat_b64": _encode_base64(block.head_logprobs),
            "input_top_logprobs_idx_flat_b64": _encode_base64(block.head_ids),
            "input_top_logprobs_val_flat_b64_dtype": "float32",
            "input_top_logprobs_idx_flat_b64_dtype": "int32",
            "input_top_logprobs_shape": list(block.head_logprobs.shape),
            "input_top_logprobs_null_prefix": 1,
        }
    )


def flat_base64_arrays(data: bytes) -> tuple[Any, Any]:
    response = json.loads(data)
    shape = response["input_top_logprobs_shape"]
    values = base64.b64decode(response["input_top_logprobs_val_flat_b64"])
    ids = base64.b64decode(response["input_top_logprobs_idx_flat_b64"])
    return np.frombuffer(ids, np.int32).reshape(shape), np.frombuffer(values, "f4").reshape(shape)


def repeated_fields(block: RowBlock) -> bytes:
    """Plain protobuf: packed `repeated uint32` and `repeated float`."""
    message = _REPEATED()
    message.ids.extend(block.head_ids.ravel())
    message.logprobs.extend(block.head_logprobs.ravel())
    message.k = block.k
    data: bytes = message.SerializeToString()
    return data


def repeated_arrays(data: bytes) -> tuple[Any, Any]:
    message = _REPEATED.FromString(data)
    shape = (-1, message.k)
    ids = np.array(message.ids, np.int32).reshape(shape)
    return ids, np.array(message.logprobs, np.float32).reshape(shape)


def _encode_base64(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _make_message_class() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    optional, repeated = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="benchmark.proto", syntax="proto3")
    message = file.message_type.add(name="RepeatedRows")
    message.field.add(name="ids", number=1, type=field.TYPE_UINT32, label=repeated)
    message.field.add(name="logprobs", number=2, type=field.TYPE_FLOAT, label=repeated)
    message.field.add(name="k", number=3, type=field.TYPE_UINT32, label=optional)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("RepeatedRows"))


_REPEATED = _make_message_class()
_NONE = np.empty(0, np.float32)

FORMATS = {
    wire_format.name: wire_format
    for wire_format in (
        Format("ours", rows_as_they_are, encode_rows, lambda data: decode_rows(data, len(data))),
        Format("protobuf repeated", rows_as_they_are, repeated_fields, repeated_arrays),
        Format("base64 of arrays", rows_as_they_are, flat_base64, flat_base64_arrays),
        Format("SGLang flat base64", to_nested_lists, sglang_base64, flat_base64_arrays),
        Format("TRL base64", to_dictionaries, trl_base64, trl_base64_lists),
        Format("TRL JSON lists", to_dictionaries, trl_json, trl_json_lists),
        Format("vLLM JSON", to_dictionaries, vllm_json, vllm_arrays),
    )
}
