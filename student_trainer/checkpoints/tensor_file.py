"""Safetensors files that the processes of a job write together, each its part, in place.

    8 bytes: N | N bytes of JSON: dtype, shape and place of every tensor | the tensors in full

Part p of P is the rows of every tensor that FSDP2 gives to process p of P (`rows_of_part`); part 0
has the header too. So a process writes what it has, without communication, and the file has the
same bytes for any P: any number of processes, and any library, can read it.

The digest of a part is the SHA-256 of its bytes in the order of the file. If there is only one
part, it is that of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from student_trainer.parallel.shards import own_slices, rows_of_part

_BLOCK = 1 << 23  # bytes that are read or written at once
_MOST_HEADER = 100_000_000  # bytes; the limit of safetensors
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class TensorFile:
    """The layout of a file: its header, and (shape, first byte, end) of each tensor, by place."""

    header: bytes
    places: Mapping[str, tuple[tuple[int, ...], int, int]]

    def spans(self, name: str, part: int, parts: int) -> tuple[int, int]:
        """Return (first byte, bytes) of the rows of `part` of a tensor."""
        shape, start, end = self.places[name]
        count = shape[0] if shape else 1
        rows = rows_of_part(count, part, parts)
        width = (end - start) // count if count else 0
        return start + rows.start * width, (rows.stop - rows.start) * width


def layout(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Return the layout of a file of `tensors`, of which only shape and dtype are read.

    The order is that of the safetensors library: large elements first, which aligns them.
    """
    listed: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: dict[str, tuple[tuple[int, ...], int, int]] = {}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])):
        shape = tuple(tensor.shape)
        end = offset + prod(shape) * tensor.element_size()
        listed[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": (offset, end),
        }
        ends[name] = (shape, offset, end)
        offset = end
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    places = {name: (shape, base + start, base + end) for name, (shape, start, end) in ends.items()}
    return TensorFile(header, places)


class PartWriter:
    """Writes tensors, or their rows, at their places in a file. Owns an open file; close it."""

    def __init__(
        self,
        path: Path,
        file: TensorFile,
        part: int = 0,
        parts: int = 1,
        *,
        hashed: bool = True,
    ) -> None:
        """Open `path`, which other processes may be writing too. Part 0 writes the header.

        `hashed`: whether to hash what is written. The digest is that of the part if the tensors are
        written in the order of `file.places`.
        """
        self._file = file
        self._part, self._parts = part, parts
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._opened = os.open(path, flags, 0o666)
        self._hashed = hashed
        self._digest = hashlib.sha256()
        if part == 0:
            self._put(0, memoryview(file.header))

    def write(self, name: str, rows: Tensor) -> None:
        """Write the rows of this part of a tensor, which are on the CPU."""
        start, length = self._file.spans(name, self._part, self._parts)
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert len(data) == length, f"{name}: {len(data)} bytes for a place of {length}"
        self._put(start, data)

    def finish(self) -> str:
        """Sync the file to disk, close it, and return the digest."""
        os.fsync(self._opened)
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._opened >= 0:
            os.close(self._opened)
        self._opened = -1

    def _put(self, start: int, data: memoryview) -> None:
        for block in range(0, len(data), _BLOCK):
            piece = data[block : block + _BLOCK]
            if self._hashed:
                self._digest.update(piece)
            done = 0
            while done < len(piece):
                done += os.pwrite(self._opened, piece[done:], start + block + done)


def read_shard(file: Any, name: str, like: Tensor) -> Tensor:
    """Return the part of a stored tensor that this process has of `like`, in the same shape.

    `file`: an open safetensors file. Nothing else is read.
    """
    return _read(file, name, own_slices(like))


def read_rows(file: Any, name: str, like: Tensor) -> Tensor:
    """Return the rows of a stored tensor, of any width, that this process has of `like`."""
    return _read(file, name, own_slices(like)[:1])


def _read(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    found: Tensor
    sizes = [one.stop - one.start for one in slices]
    if not slices:
        found = file.get_tensor(name)
    elif 0 in sizes:  # safetensors refuses an empty slice
        row = file.get_slice(name)[:1]
        found = row.new_empty([*sizes, *row.shape[len(sizes) :]])
    else:
        # A part of the columns would be a view of whole rows: more memory, and another layout than
        # the tensor has, which fused kernels of an optimizer do not see.
        found = file.get_slice(name)[slices].contiguous()
    return found


def digest_of_part(path: Path, part: int, parts: int) -> str:
    """Return the digest of a part of a file. Raises ValueError if it is no such file."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        file = _read_layout(opened.read(8), opened.fileno())
        if part == 0:
            digest.update(file.header)
        for start, length in _joined(file.spans(name, part, parts) for name in file.places):
            opened.seek(start)
            while length:
                block = opened.read(min(length, _BLOCK))
                if not block:
                    raise ValueError(f"{path} is too short")
                digest.update(block)
                length -= len(block)
    return digest.hexdigest()


def _joined(spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the spans, adjacent ones as one: with one part, a file is read in large blocks."""
    begun, size = 0, 0
    for start, length in spans:
        if start != begun + size:
            yield begun, size
            begun, size = start, 0
        size += length
    yield begun, size


def _read_layout(prefix: bytes, opened: int) -> TensorFile:
    """Read the layout of a file that may be damaged. Raises ValueError."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MOST_HEADER:
        raise ValueError("no safetensors header")
    text = os.pread(opened, length, 8)
    base, size = 8 + length, os.fstat(opened).st_size
    try:
        listed = json.loads(text)
        listed.pop("__metadata__", None)
        found = {
            name: (tuple(of["shape"]), base + of["data_offsets"][0], base + of["data_offsets"][1])
            for name, of in listed.items()
        }
        ordered = sorted(found.items(), key=lambda one: one[1][1:])
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError("no safetensors header") from error
    end = base
    for _, (_, start, stop) in ordered:
        if start != end or stop < start:
            raise ValueError("tensors overlap or leave a gap")
        end = stop
    if end != size or len(text) < length:
        raise ValueError("the file has another size than its header says")
    return TensorFile(prefix + text, dict(ordered))
