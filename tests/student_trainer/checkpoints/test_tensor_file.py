"""Files that several processes write in parallel, compared with the safetensors library."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from student_trainer.checkpoints.tensor_file import (
    PartWriter,
    TensorFile,
    _read_slices,
    build_layout,
    hash_part,
)
from student_trainer.parallel.shards import rows_of_part

MAX_PARTS = 5


def tensors() -> dict[str, Tensor]:
    """Scalars, an empty tensor, tensors with fewer rows than parts, and elements of four sizes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(13, 8, generator=generator),
        "layers.10.weight": torch.randn(3, 2, 5, generator=generator),
        "layers.2.weight": torch.randn(7, 4, generator=generator).bfloat16(),
        "norm.weight": torch.randn(2, generator=generator),
        "norm.weight/step": torch.tensor(3.0),
        "places": torch.arange(6),
        "\u00fc mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }


def write_part(
    path: Path, file: TensorFile, tensors_by_name: dict[str, Tensor], part: int, parts: int
) -> str:
    writer = PartWriter(path, file, part, parts)
    for name in file.places:
        tensor = (
            tensors_by_name[name] if tensors_by_name[name].dim() else tensors_by_name[name][None]
        )
        writer.write(name, tensor[rows_of_part(len(tensor), part, parts)])
    return writer.finish()


@pytest.mark.parametrize("parts", range(1, MAX_PARTS + 1))
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_of_the_library(
    tmp_path: Path, parts: int, metadata: dict[str, str] | None
) -> None:
    """For any number of parts, written in any order."""
    save_file(tensors(), tmp_path / "expected", metadata=metadata)
    file = build_layout(tensors(), metadata)
    order = random.Random(parts).sample(range(parts), parts)
    digests = {part: write_part(tmp_path / "found", file, tensors(), part, parts) for part in order}
    content = (tmp_path / "found").read_bytes()
    assert content == (tmp_path / "expected").read_bytes()
    for part, digest in digests.items():
        assert hash_part(tmp_path / "found", part, parts) == digest
    if parts == 1:
        assert digests[0] == hashlib.sha256(content).hexdigest()


def test_no_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "expected")
    write_part(tmp_path / "found", build_layout({}), {}, 0, 1)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_byte_is_in_one_part(tmp_path: Path, parts: int) -> None:
    """A changed byte changes the digest of one part; in the header it may make the file invalid."""
    path = tmp_path / "file"
    file = build_layout(tensors())
    digests = [write_part(path, file, tensors(), part, parts) for part in range(parts)]
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        damaged = []
        for part in range(parts):
            try:
                damaged.append(hash_part(path, part, parts) != digests[part])
            except ValueError:
                damaged.append(True)
        assert any(damaged), offset
        if offset >= len(file.header):
            assert sum(damaged) == 1, offset
    for damaged_content in (content + b"\0", content[:-1], content[:4], b"", b"\xff" * 64):
        path.write_bytes(damaged_content)
        with pytest.raises(ValueError, match=r"header|size"):
            hash_part(path, 0, parts)


def test_a_part_of_the_columns_is_no_view_of_the_rows(tmp_path: Path) -> None:
    """A fused optimizer needs weight, gradient and moments with equal strides."""
    matrix = torch.arange(12.0).reshape(3, 4)
    save_file({"a": matrix}, tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        part = _read_slices(file, "a", (slice(0, 3), slice(2, 4)))
    assert torch.equal(part, matrix[:, 2:])
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == 4 * part.numel()


def test_rows_are_divided_as_torch_divides_them() -> None:
    for rows in range(20):
        for parts in range(1, 9):
            chunks = torch.arange(rows).chunk(parts) if rows else ()
            expected = [chunk.tolist() for chunk in chunks] + [[]] * (parts - len(chunks))
            row_lists = [
                list(range(rows))[rows_of_part(rows, part, parts)] for part in range(parts)
            ]
            assert row_lists == expected
