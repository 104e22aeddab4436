"""Safetensors files that the processes of a job write together. Each process writes its part.

A file has this format:

    8 bytes: N | N bytes of JSON: dtype, shape and place of every tensor | the tensors in full

Part p of P contains the rows of every tensor that FSDP2 assigns to process p of P (`rows_of_part`).
Part 0 also contains the header. A process can therefore write its shard without communication. The
bytes of the file are the same for any P, so any number of processes, and any safetensors library,
can read the file.

The digest of a part is the SHA-256 of its bytes in file order. The digest of a single part is thus
the digest of the file.
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

_BLOCK = 1 << 23  # bytes of one read or write
_MAX_HEADER_BYTES = 100_000_000  # bytes; the limit of safetensors
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
    """The layout of a safetensors file.

    - header: the bytes of the header.
    - places: (shape, position of the first byte, position after the last byte) of each tensor, by
      name, in the order of the file.
    """

    header: bytes
    places: Mapping[str, tuple[tuple[int, ...], int, int]]

    def spans(self, name: str, part: int, parts: int) -> tuple[int, int]:
        """Return the position of part `part` of `parts` of a tensor: (offset in the file, number of
        bytes).
        """
        shape, start, end = self.places[name]
        count = shape[0] if shape else 1
        rows = rows_of_part(count, part, parts)
        width = (end - start) // count if count else 0
        return start + rows.start * width, (rows.stop - rows.start) * width


def build_layout(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Return the layout of a file that contains `tensors`. Only shapes and dtypes are read.

    The tensors are in the order of the safetensors library: tensors with large elements come first,
    so that all are aligned. `metadata`: texts by name for the header.
    """
    header_entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    relative_places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    offset = 0
    for name, tensor in sorted(
        tensors.items(), key=lambda named_tensor: (-named_tensor[1].element_size(), named_tensor[0])
    ):
        shape = tuple(tensor.shape)
        end = offset + prod(shape) * tensor.element_size()
        header_entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": (offset, end),
        }
        relative_places[name] = (shape, offset, end)
        offset = end
    text = json.dumps(header_entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    places = {
        name: (shape, base + start, base + end)
        for name, (shape, start, end) in relative_places.items()
    }
    return TensorFile(header, places)


class PartWriter:
    """Writes full tensors, or one part of their rows, into a file.

    The caller must call `finish` or `close` at the end.
    """

    def __init__(
        self,
        path: Path,
        file: TensorFile,
        part: int = 0,
        parts: int = 1,
        *,
        hashed: bool = True,
    ) -> None:
        """Open the file `path`. Other processes may write their parts of the file at the same time.

        `file`: the layout. The writer of part 0 also writes the header. `hashed`: whether to
        compute a digest. It is the digest of the part only if the tensors are written in the order
        of `file.places`.
        """
        self._file = file
        self._part, self._parts = part, parts
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._hashed = hashed
        self._digest = hashlib.sha256()
        if part == 0:
            self._write_bytes(0, memoryview(file.header))

    def write(self, name: str, rows: Tensor) -> None:
        """Write the rows of tensor `name` that belong to this part. `rows`: on the CPU."""
        start, length = self._file.spans(name, self._part, self._parts)
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert len(data) == length, f"{name}: {len(data)} bytes for a place of {length}"
        self._write_bytes(start, data)

    def finish(self) -> str:
        """Sync the file to disk, close it, and return the digest of the written bytes."""
        os.fsync(self._descriptor)
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write_bytes(self, start: int, data: memoryview) -> None:
        for block in range(0, len(data), _BLOCK):
            piece = data[block : block + _BLOCK]
            if self._hashed:
                self._digest.update(piece)
            written_bytes = 0
            while written_bytes < len(piece):
                written_bytes += os.pwrite(
                    self._descriptor, piece[written_bytes:], start + block + written_bytes
                )


def read_shard(file: Any, name: str, like: Tensor) -> Tensor:
    """Read this process's shard of a stored tensor.

    `file`: an open safetensors file. `like`: a tensor with the shape and the sharding of the stored
    tensor. Only the shard is read.
    """
    return _read_slices(file, name, own_slices(like))


def read_rows(file: Any, name: str, like: Tensor) -> Tensor:
    """Read this process's rows of a stored tensor.

    `like`: a tensor with the same number of rows, whose sharding selects the rows. Its rows may
    have another width than those of the stored tensor.
    """
    return _read_slices(file, name, own_slices(like)[:1])


def _read_slices(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    tensor: Tensor
    sizes = [axis_slice.stop - axis_slice.start for axis_slice in slices]
    if not slices:
        tensor = file.get_tensor(name)
    elif 0 in sizes:  # safetensors refuses an empty slice
        row = file.get_slice(name)[:1]
        tensor = row.new_empty([*sizes, *row.shape[len(sizes) :]])
    else:
        # A slice of columns would be a view of full rows: it takes more memory, and its strides
        # differ from the parameter's, which the fused kernels of optimizers do not check.
        tensor = file.get_slice(name)[slices].contiguous()
    return tensor


def hash_part(path: Path, part: int, parts: int) -> str:
    """Return the digest of part `part` of `parts` of a file.

    Raises ValueError if the file is not a complete safetensors file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        file = _read_layout(stream.read(8), stream.fileno())
        if part == 0:
            digest.update(file.header)
        for start, length in _merge_adjacent(file.spans(name, part, parts) for name in file.places):
            stream.seek(start)
            while length:
                block = stream.read(min(length, _BLOCK))
                if not block:
                    raise ValueError(f"{path} is too short")
                digest.update(block)
                length -= len(block)
    return digest.hexdigest()


def _merge_adjacent(spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge adjacent (start, length) spans, so that files are read in large blocks."""
    merged_start, merged_length = 0, 0
    for start, length in spans:
        if start != merged_start + merged_length:
            yield merged_start, merged_length
            merged_start, merged_length = start, 0
        merged_length += length
    yield merged_start, merged_length


def _read_layout(prefix: bytes, descriptor: int) -> TensorFile:
    """Return the layout of an open file, which may be damaged.

    `prefix`: the first 8 bytes of the file. `descriptor`: the file descriptor. Raises ValueError if
    the file is not a complete safetensors file.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors header")
    text = os.pread(descriptor, length, 8)
    base, size = 8 + length, os.fstat(descriptor).st_size
    try:
        header_entries = json.loads(text)
        header_entries.pop("__metadata__", None)
        places = {
            name: (
                tuple(entry["shape"]),
                base + entry["data_offsets"][0],
                base + entry["data_offsets"][1],
            )
            for name, entry in header_entries.items()
        }
        ordered_places = sorted(places.items(), key=lambda place: place[1][1:])
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError("no safetensors header") from error
    end = base
    for _, (_, start, stop) in ordered_places:
        if start != end or stop < start:
            raise ValueError("tensors overlap or leave a gap")
        end = stop
    if end != size or len(text) < length:
        raise ValueError("the file has another size than its header says")
    return TensorFile(prefix + text, dict(ordered_places))
