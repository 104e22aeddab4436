"""Receives a pushed weight update, validates all of it, and applies it between two batches."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from protos import teacher_pb2
from protos.errors import Corrupt, InvalidInput, Overloaded, TimedOut, WrongState
from protos.program.logs import fields
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import MAX_CHUNK_BYTES
from teacher_service.engines.base import (
    ScoringEngine,
    ScoringEngineInfo,
    TensorSpec,
    UpdatableEngine,
    WeightUpdate,
)
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.dispatcher import Dispatcher

log = logging.getLogger(__name__)

# A push holds memory and blocks other pushes, so a stalled push is cancelled.
SECONDS_BETWEEN_PARTS = 60.0
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The largest finite value of each dtype: a larger float32 would be served as infinity.
_LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}

Parts = AsyncIterator[teacher_pb2.WeightsPart]


class WeightUpdater:
    """Applies weight updates to an engine, one push at a time. A failed push changes no weight."""

    def __init__(self, engine: ScoringEngine, dispatcher: Dispatcher) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._pushing = False

    async def push(self, parts: Parts) -> ScoringEngineInfo:
        """Receive, validate and apply an update; return the info of the engine after it.

        Raises WrongState if the engine cannot take weights or the update follows another version,
        InvalidInput if a tensor is wrong, missing or not finite, Corrupt if a checksum does not
        match, Overloaded if another push is in progress, and TimedOut if no part arrives for 60
        seconds. After each of these errors, the weights are unchanged.
        """
        engine, batcher = self._engine, self._dispatcher
        if not isinstance(engine, UpdatableEngine) or not isinstance(batcher, Batcher):
            raise WrongState(
                f"the engine {engine.info.name} cannot replace its weights while it serves",
                hint="serve the model with --engine hf",
            )
        if self._pushing:
            raise Overloaded("another push of weights is in progress", hint="retry later")
        self._pushing = True
        try:
            start, base_version = time.perf_counter(), engine.info.version

            def apply(update: WeightUpdate) -> None:
                # Check again: an earlier push, abandoned by its client, may have been applied
                # since this push started.
                _require_follows(base_version, engine.info.version)
                engine.update(update)

            update = await _receive(parts, engine.parameters(), base_version)
            failpoint("weights-received")
            await batcher.run_between_batches(lambda: apply(update))
            failpoint("weights-applied")
            seconds = round(time.perf_counter() - start, 3)
            version = engine.info.version
            log.info("weights", extra=fields(version=version, tau=update.tau, seconds=seconds))
            return engine.info
        finally:
            self._pushing = False


async def _receive(parts: Parts, expected: Mapping[str, TensorSpec], version: int) -> WeightUpdate:
    header = (await _receive_part(parts)).header
    tau = _parse_tau(header)
    _require_follows(header.base_version, version)
    specs = _parse_specs(header, expected)
    hasher = xxhash.xxh3_128()
    tensors: dict[str, tuple[TensorSpec, NDArray[Any]]] = {}
    for index, (name, spec) in enumerate(specs.items()):
        data = np.empty(_count_bytes(spec), np.uint8)
        limit = min(_LARGEST[spec.dtype], _LARGEST[expected[name].dtype])
        offset = 0
        while offset < data.size:
            chunk = (await _receive_part(parts)).chunk
            _require_next_chunk(chunk, name, index, offset, data.size, _ITEM_BYTES[spec.dtype])
            chunk_bytes = np.frombuffer(chunk.data, np.uint8)
            _require_finite(chunk_bytes, spec.dtype, limit, name)
            data[offset : offset + chunk_bytes.size] = chunk_bytes
            hasher.update(chunk.data)
            offset += chunk_bytes.size
        hasher.update(repr((name, spec)).encode())
        tensors[name] = spec, data
    return WeightUpdate(tensors, tau, hasher.hexdigest())


async def _receive_part(parts: Parts) -> teacher_pb2.WeightsPart:
    try:
        async with asyncio.timeout(SECONDS_BETWEEN_PARTS):
            return await anext(parts)
    except StopAsyncIteration:
        _refuse("tensors", "the push ended before all tensors arrived", "push again")
    except TimeoutError as error:
        raise TimedOut(f"no part of the push arrived for {SECONDS_BETWEEN_PARTS:g} s") from error


def _require_follows(base: int, version: int) -> None:
    if base != version:
        raise WrongState(
            f"the update follows version {base}, the teacher has {version}",
            field="base_version",
            hint="read the version with GetInfo, and check that no other client pushes weights",
        )


def _parse_tau(header: teacher_pb2.WeightsHeader) -> float | None:
    match header.mode:
        case teacher_pb2.WEIGHTS_MODE_REPLACE:
            return None
        case teacher_pb2.WEIGHTS_MODE_EMA if 0 < header.tau < 1:
            return header.tau
        case teacher_pb2.WEIGHTS_MODE_EMA:
            _refuse("tau", f"must be between 0 and 1, got {header.tau}", "use 0.9 to 0.999")
        case _:
            _refuse("mode", "must be replace or EMA", "start the push with a header that sets it")


def _parse_specs(
    header: teacher_pb2.WeightsHeader, expected: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return the specs of the tensors that follow, in order; they must match the model exactly."""
    specs: dict[str, TensorSpec] = {}
    for tensor in header.tensors:
        name, spec = tensor.name, TensorSpec(tuple(tensor.shape), tensor.dtype)
        if name not in expected:
            _refuse(name, "the model has no such parameter", "push model.named_parameters()")
        if name in specs:
            _refuse(name, "is listed twice in the header", "push model.named_parameters()")
        served_spec = expected[name]
        if spec.shape != served_spec.shape:
            _refuse(
                name,
                f"has shape {list(spec.shape)}, but the model's has {list(served_spec.shape)}",
                "push the weights of the same model",
            )
        if spec.dtype not in ("float32", served_spec.dtype):
            _refuse(
                name,
                f"has dtype {spec.dtype or 'none'}, but the model is served in {served_spec.dtype}",
                f"push float32 or {served_spec.dtype}",
            )
        specs[name] = spec
    missing_name = next((name for name in expected if name not in specs), None)
    if missing_name is not None:
        _refuse(missing_name, "is missing", "push all of model.named_parameters()")
    total = sum(map(_count_bytes, specs.values()))
    if header.total_bytes != total:
        _refuse(
            "total_bytes", f"is {header.total_bytes}, but the tensors have {total}", "push again"
        )
    return specs


def _count_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _ITEM_BYTES[spec.dtype]


def _require_next_chunk(
    chunk: teacher_pb2.WeightsChunk, name: str, index: int, start: int, size: int, item_bytes: int
) -> None:
    if (chunk.tensor, chunk.offset) != (index, start):
        _refuse(
            name,
            f"expected its chunk at byte {start}, got tensor {chunk.tensor} at byte {chunk.offset}",
            "send the tensors in the order of the header, without gaps",
        )
    byte_count = len(chunk.data)
    if not 0 < byte_count <= min(size - start, MAX_CHUNK_BYTES) or byte_count % item_bytes:
        _refuse(
            name, f"has a chunk of {byte_count} bytes", "send at most 1 MiB, and only whole values"
        )
    if xxhash.xxh3_64_intdigest(chunk.data) != chunk.xxh3:
        raise Corrupt(
            f"the checksum of the chunk at byte {start} does not match",
            field=name,
            hint="push again",
        )


def _require_finite(data: NDArray[Any], dtype: str, limit: float, name: str) -> None:
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        numbers = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = data.view("<f4" if dtype == "float32" else "<f2")
    # A NaN fails both comparisons.
    if not (numbers.min() >= -limit and numbers.max() <= limit):
        _refuse(
            name,
            "has a value that is not finite in the dtype that is served",
            "check the student; its training may have diverged",
        )


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidInput(message, field=field, hint=hint)
