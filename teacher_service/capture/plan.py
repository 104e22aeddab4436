"""The plan of a capture: all sequences in order, and their division into files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from teacher_service.capture.sequences import CaptureSequence

_HEADER_BYTES = 64  # of an entry besides its rows, the codec's header included
# A small capture has as many files, if it has as many sequences: with fewer, a capture that is
# divided into parts would have parts without work.
_FEWEST_FILES = 16


@dataclass(frozen=True)
class Plan:
    """All sequences of a capture and their division into files.

    Sequence i has the token ids token_ids[offsets[i]:offsets[i + 1]] and is scored from position
    starts[i] on. File j of the store holds the sequences files[j] to files[j + 1] - 1. `token_ids`
    is a memory map of an unnamed file.

    The plan depends only on the data and the job, not on earlier attempts or on the number of
    machines.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int32]
    files: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> CaptureSequence:
        first, last = self.offsets[index], self.offsets[index + 1]
        return CaptureSequence(self.token_ids[first:last], int(self.starts[index]))

    @property
    def rows(self) -> int:
        """Number of rows of all sequences."""
        return int(self.offsets[-1]) - int(self.starts.sum())

    def files_of(self, index: int, count: int) -> range:
        """Return the file numbers of part `index` (from 0) of `count` parts of the data."""
        total = len(self.files) - 1
        return range(total * index // count, total * (index + 1) // count)

    def file(self, number: int) -> range:
        """Return the sequence numbers of a file."""
        return range(int(self.files[number]), int(self.files[number + 1]))


def make_plan(
    sequences: Iterable[CaptureSequence],
    *,
    directory: Path,
    row_bytes: float,
    file_bytes: int,
) -> Plan:
    """Read all sequences and divide them into files of at most about `file_bytes` bytes.

    The token ids go to an unnamed temporary file in `directory`, which vanishes with this process.
    `row_bytes` is the size of one row before compression. A file ends with the sequence that brings
    it to `file_bytes`. If that makes fewer than 16 files, the sequences are also cut into 16 parts
    of equal numbers of sequences (or as many as there are sequences).
    """
    offsets, starts, ends = [0], [], {0}
    size = 0.0
    with tempfile.TemporaryFile(dir=directory) as stream:
        for sequence in sequences:
            stream.write(sequence.token_ids.astype("<i4").tobytes())
            offsets.append(offsets[-1] + len(sequence.token_ids))
            starts.append(sequence.start)
            size += sequence.rows * row_bytes + sequence.token_ids.nbytes + _HEADER_BYTES
            if size >= file_bytes:
                ends.add(len(starts))
                size = 0.0
        stream.flush()
        mapped = np.memmap(stream, "<i4", "r") if starts else np.empty(0, np.int32)
    ends.add(len(starts))
    if len(ends) <= _FEWEST_FILES:
        ends.update(len(starts) * part // _FEWEST_FILES for part in range(1, _FEWEST_FILES))
    files = np.array(sorted(ends))
    return Plan(np.asarray(mapped), np.array(offsets, np.int64), np.array(starts, np.int32), files)
