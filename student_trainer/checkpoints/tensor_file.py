"""Safetensors files that the processes of a job write together. Each process writes its part.

    8 bytes: N | N bytes of JSON: dtype, shape and place of every tensor | the tensors in full

Part p of P is the rows of every tensor that FSDP2 gives to process p of P (`rows_of_part`); part 0
also has the header. A process therefore writes its shard without communication. The file has the
same bytes for any P, so any number of processes, and any safetensors library, can read it.

The digest of a part is the SHA-256 of its bytes in file order. With a single part, it is the digest
of the file.
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
    """The layout of a file.

    header: the bytes of the header. places: (shape, first byte, end) of each tensor by name, in
    file order.
    """

    header: bytes
    places: Mapping[str, tuple[tuple[int, ...], int, int]]

    def spans(self, name: str, part: int, parts: int) -> tuple[int, int]:
        """Return (offset in the file, number of bytes) of part `part` of the rows of a tensor."""
        shape, start, end = self.places[name]
        count = shape[0] if shape else 1
        rows = rows_of_part(count, part, parts)
        width = (end - start) // count if count else 0
        return start + rows.start * width, (rows.stop - rows.start) * width


def build_layout(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Return the layout of a file of `tensors`. Only shapes and dtypes are read.

    The order is as in the safetensors library: large elements first, for alignment.
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
    """Writes tensors, or their rows, at their positions in a file. Call `finish` or `close` at the
    end.
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
        """Open `path`, which other processes may be writing too. Part 0 writes the header.

        `hashed`: whether to compute the digest. The digest is the digest of the part if the tensors
        are written in the order of `file.places`.
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
        """Write this part's `rows` of a tensor; they are on the CPU."""
        start, length = self._file.spans(name, self._part, self._parts)
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert len(data) == length, f"{name}: {len(data)} bytes for a place of {length}"
        self._write_bytes(start, data)

    def finish(self) -> str:
        """Sync the file to disk, close it, and return the digest."""
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
    """Return this process's shard of a stored tensor, sharded and shaped like `like`.

    `file`: an open safetensors file. Only the shard is read.
    """
    return _read_slices(file, name, own_slices(like))


def read_rows(file: Any, name: str, like: Tensor) -> Tensor:
    """Return this process's rows of a stored tensor of any width, sharded like `like`."""
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
    """Return the digest of a part of a file. Raises ValueError if it is not a safetensors file."""
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
    """Merge adjacent spans, so that files are read in large blocks."""
    merged_start, merged_length = 0, 0
    for start, length in spans:
        if start != merged_start + merged_length:
            yield merged_start, merged_length
            merged_start, merged_length = start, 0
        merged_length += length
    yield merged_start, merged_length


def _read_layout(prefix: bytes, descriptor: int) -> TensorFile:
    """Read the layout of a file that may be damaged. Raises ValueError."""
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
