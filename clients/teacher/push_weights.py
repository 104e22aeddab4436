"""Pushes weights to a teacher: a header, then the tensors in chunks.

Only one tensor at a time is in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import InvalidInput
from protos.rpc.transport import MAX_CHUNK_BYTES

# numpy has no bfloat16: an array of uint16 holds the bits of one.
_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "uint16": "bfloat16"}
_PUSH_SECONDS = 3600.0
_PART_BYTES = MAX_CHUNK_BYTES // 8 * 8


def push_weights(
    stub: teacher_pb2_grpc.TeacherStub,
    tensors: Mapping[str, NDArray[Any]],
    *,
    tau: float | None,
    base_version: int,
) -> teacher_pb2.PushWeightsReply:
    """Push `tensors` to the teacher of `stub`, and return its reply. Waits at most one hour.

    - `tensors`, `tau`: see `weights_parts`
    - `base_version`: version of the teacher's weights that the push changes; the teacher refuses
      the push if its version differs

    Raises RpcError if the call fails, InvalidInput for an array of another dtype.
    """
    parts = weights_parts(tensors, tau=tau, base_version=base_version)
    # Take the header here, so that InvalidInput reaches the caller and not gRPC's sender thread.
    header = next(parts)
    return stub.PushWeights(itertools.chain([header], parts), timeout=_PUSH_SECONDS)


def weights_parts(
    tensors: Mapping[str, NDArray[Any]], *, tau: float | None, base_version: int
) -> Iterator[teacher_pb2.WeightsPart]:
    """Yield the messages of one push.

    - `tensors`: the arrays by parameter name: float32, float16, or uint16 with the bits of bfloat16
    - `tau`: None replaces the teacher's weights by `tensors`. A number averages: the teacher sets
      phi <- tau phi + (1 - tau) theta, where phi are its weights and theta is `tensors`.
    - `base_version`: see `push_weights`

    Every array is read twice: first for its shape and dtype, then for its data. If the mapping
    creates its arrays on access, only one array is in memory. Raises InvalidInput for an array of
    another dtype.
    """
    specs = [_tensor_spec(name, tensors[name]) for name in tensors]
    replace, ema = teacher_pb2.WEIGHTS_MODE_REPLACE, teacher_pb2.WEIGHTS_MODE_EMA
    header = teacher_pb2.WeightsHeader(
        mode=replace if tau is None else ema,
        tau=tau or 0.0,
        base_version=base_version,
        tensors=specs,
        total_bytes=sum(_tensor_bytes(spec) for spec in specs),
    )
    yield teacher_pb2.WeightsPart(header=header)
    for index, spec in enumerate(specs):
        # Copies only an array that is strided or big-endian.
        array = np.ascontiguousarray(_little_endian(tensors[spec.name]))
        data = array.reshape(-1).view(np.uint8)
        for offset in range(0, data.size, _PART_BYTES):
            part = data[offset : offset + _PART_BYTES].tobytes()
            digest = xxhash.xxh3_64_intdigest(part)
            chunk = teacher_pb2.WeightsChunk(tensor=index, offset=offset, data=part, xxh3=digest)
            yield teacher_pb2.WeightsPart(chunk=chunk)


def _tensor_spec(name: str, array: NDArray[Any]) -> teacher_pb2.TensorSpec:
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        raise InvalidInput(
            f"an array of dtype {array.dtype} cannot be pushed",
            field=name,
            hint="push float32, float16, or the bits of bfloat16 as uint16",
        )
    return teacher_pb2.TensorSpec(name=name, shape=array.shape, dtype=dtype)


def _tensor_bytes(spec: teacher_pb2.TensorSpec) -> int:
    return math.prod(spec.shape) * (4 if spec.dtype == "float32" else 2)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.byteorder == ">":
        return array.astype(array.dtype.newbyteorder("<"))
    return array
