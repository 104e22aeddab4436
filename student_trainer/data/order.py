"""Computes the order of prompts, and how the prompts of a step are divided among data sets."""

from __future__ import annotations

import heapq
import math
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protos.operating_system import reserve_space

# Indices of records or stored sequences.
Indices: TypeAlias = NDArray[np.signedinteger[Any]]

_MIN_MAPPED = 1 << 18  # a permutation of 1 MiB
_CHECKSUM_BYTES = 4
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class EpochOrder:
    """The indices 0 to size - 1 in an order fixed by the seed; each epoch has a new permutation."""

    size: int
    seed: int

    def of_step(self, step: int, count: int) -> list[int]:
        """Return the `count` indices of `step` (from 1); earlier calls do not change the result."""
        first = (step - 1) * count
        return [self._index_at(index) for index in range(first, first + count)]

    def _index_at(self, index: int) -> int:
        epoch, position = divmod(index, self.size)
        return int(permutation(self.size, self.seed, epoch)[position])


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int, directory: Path | None = None) -> Indices:
    """Return the permutation of range(size) for an epoch: int32 if `size` fits, otherwise int64.

    The permutation is the same on every machine. Training uses the epochs from 0 on. Negative
    epochs give other permutations of the same seed, for selections that must not depend on the
    training order:

    - epoch -1: its first indices are the held-out data.
    - epoch -2: its first indices are the records that are checked before training.

    The result is cached: do not modify it.

    `directory`: the folder of the file that holds a large permutation. All processes map this file
    into memory and share it. If the directory is None or not writable, the permutation is in
    memory.
    """
    if directory is not None and size >= _MIN_MAPPED:
        with suppress(OSError):
            return _map_permutation(size, seed, epoch, directory)
    return _draw(np.empty(size, _index_type(size)), seed, epoch)


def _index_type(size: int) -> type[np.signedinteger[Any]]:
    return np.int32 if size < 2**31 else np.int64


def _draw(order: Indices, seed: int, epoch: int) -> Indices:
    """Fill `order` with the permutation of an epoch. Its type does not change the values."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    torch.randperm(len(order), generator=generator, out=torch.from_numpy(order))
    return order


def _map_permutation(size: int, seed: int, epoch: int, directory: Path) -> Indices:
    """Map the file of a permutation; write the file first if it is missing or damaged.

    Several processes may write the file at the same time; all write the same content. The file of
    the previous epoch is deleted. Raises OSError.
    """
    path = directory / f"order-{size}-{seed}-{epoch}"
    order = _open_order(path, size)
    if order is not None:
        return order
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with partial.open("x+b") as file:
            size_bytes = size * np.dtype(_index_type(size)).itemsize
            reserve_space(file.fileno(), size_bytes + _CHECKSUM_BYTES)
            _draw(np.memmap(file, _index_type(size), "r+", shape=size), seed, epoch)
            checksum = _checksum(file, size_bytes)
            file.seek(size_bytes)
            file.write(checksum)
        order = _open_order(path, size)  # of a faster process
        if order is None:
            partial.replace(path)
            order = np.memmap(path, _index_type(size), "r", shape=size)
    finally:
        partial.unlink(missing_ok=True)
    if epoch > 0:
        (directory / f"order-{size}-{seed}-{epoch - 1}").unlink(missing_ok=True)
    return order


def _open_order(path: Path, size: int) -> Indices | None:
    """Map the file of a permutation; None if the file is missing or damaged. Raises OSError."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        size_bytes = size * np.dtype(_index_type(size)).itemsize
        checksum = _checksum(file, size_bytes)
        if file.read() == checksum:  # the rest of the file
            return np.memmap(file, _index_type(size), "r", shape=size)
    return None


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Return the checksum of the first `size` bytes of a file.

    The position of the file is then `size`.
    """
    file.seek(0)
    checksum = 0
    for start in range(0, size, _READ_BYTES):
        checksum = zlib.crc32(file.read(min(_READ_BYTES, size - start)), checksum)
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def count_per_set(shares: Sequence[Fraction], total: int) -> list[int]:
    """Return how many of the first `total` prompts come from each data set.

    `shares`: the share of each data set, positive, with the sum 1. The counts follow Webster's
    method (Balinski and Young, Fair Representation, 1982). With this method, no count falls when
    `total` rises, so each data set is consumed in order.
    """
    # Webster's counts are never further below the exact shares than the number of data sets.
    counts = [max(0, math.floor(share * total) - len(shares)) for share in shares]
    _add_prompts(shares, counts, total - sum(counts))
    return counts


def assign_sets(shares: Sequence[Fraction], first: int, count: int) -> list[int]:
    """Return the index of the data set of each of `count` prompts, from prompt `first` (from 0) on.

    The prompts of each data set are spread evenly. `shares`: see `count_per_set`.
    """
    return _add_prompts(shares, count_per_set(shares, first), count)


def _add_prompts(shares: Sequence[Fraction], counts: list[int], count: int) -> list[int]:
    """Add `count` prompts to `counts` in place, and return the data set of each new prompt."""
    numbers = range(len(shares))
    queue = [((2 * counts[number] + 1) / shares[number], number) for number in numbers]
    heapq.heapify(queue)
    chosen_sets = []
    for _ in range(count):
        _, number = queue[0]
        counts[number] += 1
        heapq.heapreplace(queue, ((2 * counts[number] + 1) / shares[number], number))
        chosen_sets.append(number)
    return chosen_sets
