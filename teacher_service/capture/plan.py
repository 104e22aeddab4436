"""The plan of a capture: all sequences in order, and their division into files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.runs.directory import replace_file
from teacher_service.capture.sequences import CaptureSequence, SequenceReader

_HEADER_BYTES = 64  # bytes of an entry besides its rows, including the codec's header
# A capture has at least this many files, if it has this many sequences. With fewer files, some
# parts of a capture that is divided into parts would have no work.
_FEWEST_FILES = 16
_SEQUENCES_BETWEEN_POLLS = 1000
_FACTS = "plan.json"
_DTYPES = {
    "token_ids": "<i4",
    "offsets": "<i8",
    "starts": "<i4",
    "images": "|u1",
    "image_ends": "<i8",
    "prompts": "<i4",
    "prompt_ends": "<i8",
    "files": "<i8",
}


@dataclass(frozen=True)
class CapturePlan:
    """All sequences of a capture and their division into files.

    - token_ids, offsets: sequence i has the token ids token_ids[offsets[i]:offsets[i + 1]].
    - starts: sequence i is scored from position starts[i] on.
    - images, image_ends: the images of sequence i are images[image_ends[i]:image_ends[i + 1]].
    - prompts, prompt_ends: the teacher's own prompt for sequence i is
      prompts[prompt_ends[i]:prompt_ends[i + 1]]; empty if student and teacher have the same prompt.
    - files: file j of the store has the sequences files[j] to files[j + 1] - 1.
    - too_long, empty: numbers of omitted sequences and records; see SequenceReader.

    The arrays are memory maps of files. The plan depends only on the data and the job, not on
    earlier attempts or on the number of machines.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int32]
    images: NDArray[np.uint8]
    image_ends: NDArray[np.int64]
    prompts: NDArray[np.int32]
    prompt_ends: NDArray[np.int64]
    files: NDArray[np.int64]
    too_long: int
    empty: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> CaptureSequence:
        first, last = self.offsets[index], self.offsets[index + 1]
        images = self.images[self.image_ends[index] : self.image_ends[index + 1]].tobytes()
        prompt = self.prompts[self.prompt_ends[index] : self.prompt_ends[index + 1]]
        return CaptureSequence(self.token_ids[first:last], int(self.starts[index]), images, prompt)

    @property
    def rows(self) -> int:
        """Number of rows of all sequences."""
        return int(self.offsets[-1]) - int(self.starts.sum(dtype=np.int64))

    @property
    def omissions(self) -> str:
        """A sentence about the records that are not captured, by reason; "" if there are none."""
        if not self.too_long and not self.empty:
            return ""
        return f"left out: {self.too_long} too long, {self.empty} with nothing to score"

    def files_of(self, index: int, count: int) -> range:
        """Return the file numbers of part `index` (from 0), if all files form `count` parts."""
        total = len(self.files) - 1
        return range(total * index // count, total * (index + 1) // count)

    def file(self, number: int) -> range:
        """Return the numbers of the sequences in the file with this number."""
        return range(int(self.files[number]), int(self.files[number + 1]))


def make_plan(
    sequences: SequenceReader,
    directory: Path,
    *,
    row_bytes: float,
    file_bytes: int,
    key: str = "",
    on_poll: Callable[[], None] = lambda: None,
) -> CapturePlan:
    """Read all sequences and divide them into files of at most about `file_bytes` bytes.

    - directory: the plan is written there; earlier content is removed.
    - row_bytes: size of one row in bytes, before compression.
    - key: `read_plan` returns the plan only for the same key.
    - on_poll: called after every 1,000 sequences; an exception in `on_poll` ends the reading.

    A file ends with the sequence that brings its size to `file_bytes`. If this gives fewer than 16
    files, the sequences are also divided into 16 equal parts (or one part per sequence). The memory
    does not grow with the number of sequences.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    count = offset = image_end = prompt_end = 0
    ends = {0}
    size = 0.0
    with ExitStack() as stack:
        token_ids, offsets, starts, images, image_ends, prompts, prompt_ends, files = plan_files = [
            stack.enter_context((directory / name).open("wb")) for name in _DTYPES
        ]
        for ends_file in (offsets, image_ends, prompt_ends):
            ends_file.write(np.int64(0).tobytes())
        for sequence in sequences:
            count, offset = count + 1, offset + len(sequence.token_ids)
            image_end += len(sequence.images)
            prompt_end += len(sequence.teacher_prompt)
            token_ids.write(sequence.token_ids.astype("<i4").tobytes())
            offsets.write(np.int64(offset).tobytes())
            starts.write(np.int32(sequence.start).tobytes())
            images.write(sequence.images)
            image_ends.write(np.int64(image_end).tobytes())
            prompts.write(sequence.teacher_prompt.astype("<i4").tobytes())
            prompt_ends.write(np.int64(prompt_end).tobytes())
            size += sequence.rows * row_bytes + sequence.token_ids.nbytes + _HEADER_BYTES
            if size >= file_bytes:
                ends.add(count)
                size = 0.0
            if count % _SEQUENCES_BETWEEN_POLLS == 0:
                on_poll()
        ends.add(count)
        if len(ends) <= _FEWEST_FILES:
            ends.update(count * part // _FEWEST_FILES for part in range(1, _FEWEST_FILES))
        files.write(np.array(sorted(ends), "<i8").tobytes())
        for file in plan_files:
            file.flush()
            os.fsync(file.fileno())
    facts = {"key": key, "too_long": sequences.too_long, "empty": sequences.empty}
    # Write this file last: a plan without this file is not complete.
    replace_file(directory / _FACTS, json.dumps(facts))
    plan = read_plan(directory, key)
    assert plan is not None
    return plan


def read_plan(directory: Path, key: str) -> CapturePlan | None:
    """Return the plan in `directory`; None if it is missing, incomplete or has another key."""
    try:
        facts = json.loads((directory / _FACTS).read_text())
        if facts["key"] != key:
            return None
        arrays = {name: _map_array(directory / name, dtype) for name, dtype in _DTYPES.items()}
        plan = CapturePlan(**arrays, too_long=facts["too_long"], empty=facts["empty"])
        ends = (plan.offsets[-1], plan.image_ends[-1], plan.prompt_ends[-1], plan.files[-1])
        sizes = (len(plan.token_ids), len(plan.images), len(plan.prompts), len(plan))
        is_complete = ends == sizes and len(plan.offsets) == len(plan) + 1
        return plan if is_complete else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _map_array(path: Path, dtype: str) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
