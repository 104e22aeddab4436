"""What a capture will score: every sequence in order, and which of them make which file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from teacher_service.capture.sequences import TokenSequence

_HEADER_BYTES = 64  # of the codec, and of an entry besides its rows


@dataclass(frozen=True)
class Plan:
    """Sequence i has the token ids offsets[i] to offsets[i + 1] of `token_ids`, a map of a file
    without a name. File j of the store holds the sequences files[j] to files[j + 1].

    A pure function of the data: whatever happened before, and on however many machines.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int32]
    files: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> TokenSequence:
        first, last = self.offsets[index], self.offsets[index + 1]
        return TokenSequence(self.token_ids[first:last], int(self.starts[index]))

    @property
    def rows(self) -> int:
        """Of all sequences."""
        return int(self.offsets[-1]) - int(self.starts.sum())

    def files_of(self, index: int, count: int) -> range:
        """The files that machine `index` of `count` makes."""
        total = len(self.files) - 1
        return range(total * index // count, total * (index + 1) // count)

    def file(self, number: int) -> range:
        """The sequences of a file."""
        return range(int(self.files[number]), int(self.files[number + 1]))


def make_plan(
    sequences: Iterable[TokenSequence],
    *,
    directory: Path,
    row_bytes: float,
    file_bytes: int,
) -> Plan:
    """Read all sequences into a file of `directory` that nobody sees, and that goes with us.

    `row_bytes`: of one row before compression; a file ends with the sequence that fills it.
    """
    offsets, starts, files = [0], [], [0]
    size = 0.0
    with tempfile.TemporaryFile(dir=directory) as stream:
        for sequence in sequences:
            stream.write(sequence.token_ids.astype("<i4").tobytes())
            offsets.append(offsets[-1] + len(sequence.token_ids))
            starts.append(sequence.start)
            size += sequence.rows * row_bytes + sequence.token_ids.nbytes + _HEADER_BYTES
            if size >= file_bytes:
                files.append(len(starts))
                size = 0.0
        stream.flush()
        mapped = np.memmap(stream, "<i4", "r") if starts else np.empty(0, np.int32)
    if files[-1] != len(starts):
        files.append(len(starts))
    return Plan(
        np.asarray(mapped), np.array(offsets, np.int64), np.array(starts, np.int32), np.array(files)
    )
