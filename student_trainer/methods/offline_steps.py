"""Reads the stored sequences of offline steps ahead of training, and mixes them with rollouts.

`offline.py` connects these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from clients.data.images import ImageReader, read_stored_images
from clients.store.dataset import LogitDataset
from protos.errors import Corrupt, InvalidInput
from student_trainer.data.images import with_images
from student_trainer.data.order import EpochOrder, Indices
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import TokenSequence
from student_trainer.loop.step import Step
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.teachers.scored_rollouts import RolloutsOfSteps
from student_trainer.teachers.source import PendingRows, TeacherSource, resolved

_STEPS_AHEAD = 2
# Returns a stored sequence, by its index, with its rows.
ReadSequence = Callable[[LogitDataset, int], PendingRows]


@dataclass(frozen=True)
class Mixture:
    """The on-policy part of a step: the student answers the prompts of the first `count` sequences.

    - training: samples the answers.
    - teacher: scores the answers.
    - count: the number of answers per step, over all processes.
    """

    training: RolloutsOfSteps
    teacher: TeacherSource
    count: int


@dataclass(frozen=True)
class _Share:
    """The part of a step that this process reads from the store.

    - stored_sequences: the stored sequences with their rows.
    - prompts: the prompts that the student answers, and their rollout numbers. A rollout number
      fixes the random stream of the answer.
    """

    stored_sequences: list[PendingRows]
    prompts: tuple[list[Prompt], list[int]]


class StoredSteps:
    """Returns the stored sequences of each step. A thread verifies and decodes them in advance.

    At most two future steps are in memory. The sequences of a step depend only on the seed and the
    step number.
    """

    def __init__(
        self,
        data: LogitDataset,
        chosen: Indices,
        accelerator: Accelerator,
        *,
        seed: int,
        per_step: int,
        last_step: int,
        read: ReadSequence,
        mixture: Mixture | None = None,
    ) -> None:
        """Set up the order of the sequences without reading them.

        - chosen: indices of the training sequences in `data`.
        - per_step: the number of sequences of a step over all processes.
        - last_step: the last step to prefetch.
        - read: reads a sequence.
        - mixture: the on-policy part; None if all sequences of a step are stored sequences.
        """
        self._data = data
        self._chosen = chosen
        self._accelerator = accelerator
        self._order = EpochOrder(len(chosen), seed)
        self._per_step = per_step
        self._last_step = last_step
        self._read_sequence = read
        self._mixture = mixture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._reads: dict[int, Future[_Share]] = {}

    def of_step(self, step: int) -> Step:
        """Collective. Return this process's sequences of `step` (from 1) with their rows.

        If a stored sequence is damaged on one rank, all ranks raise Corrupt before the step changes
        a weight.
        """
        for read_step in range(step, min(step + _STEPS_AHEAD, self._last_step) + 1):
            if read_step not in self._reads:
                self._reads[read_step] = self._thread.submit(self._read_share, read_step)
        share = raise_on_all_ranks(self._accelerator, self._reads.pop(step).result)
        mixture = self._mixture
        if mixture is None:
            return Step([share.stored_sequences])

        def select_prompts(number: int) -> tuple[Sequence[Prompt], Sequence[int]]:
            # An engine may sample for steps that are not read yet.
            return share.prompts if number == step else self._select_prompts(number)

        sampled_rollouts = mixture.training.of_step(step, select_prompts)
        mixture.teacher.finish()
        return Step(
            [sampled_rollouts + share.stored_sequences],
            mixture.training.metrics(step, sampled_rollouts),
        )

    def _read_share(self, step: int) -> _Share:
        places, own_indices = self._select_sequences(step)
        sampled_count = self._mixture.count if self._mixture else 0
        sequence_indices = [int(self._chosen[places[i]]) for i in own_indices if i >= sampled_count]
        stored_sequences = [self._read_sequence(self._data, index) for index in sequence_indices]
        return _Share(stored_sequences, self._select_prompts(step))

    def _select_prompts(self, step: int) -> tuple[list[Prompt], list[int]]:
        """Return the prompts that this process's student answers, and their rollout numbers."""
        places, own_indices = self._select_sequences(step)
        sampled_indices = [i for i in own_indices if self._mixture and i < self._mixture.count]
        prompts = [stored_prompt(self._data, int(self._chosen[places[i]])) for i in sampled_indices]
        return prompts, [(step - 1) * len(places) + i for i in sampled_indices]

    def _select_sequences(self, step: int) -> tuple[Sequence[int], range]:
        """Return the sequences of a step as positions in `chosen`, and the part of this process.

        The part of this process is a range of indices into the first result.
        """
        places = self._order.of_step(step, self._per_step)
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        return places, range(rank, len(places), world)


def read(data: LogitDataset, index: int) -> PendingRows:
    """Read stored sequence `index`. Its rows are available at once, so nothing waits for them.

    Raises Corrupt if the bytes of the sequence are damaged. The message names the sequence and the
    remedy.
    """
    entry, block = data.decoded(index)
    ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int64)
    return PendingRows(TokenSequence(torch.from_numpy(ids), entry.start), resolved(block))


def make_image_reading(reader: ImageReader, folder: str | None) -> ReadSequence:
    """Return a function that reads stored sequences with images, in the same form as `read`.

    - reader: the student's image reader.
    - folder: the folder that image paths start from; None means the folder of the captured data.

    The returned function raises Corrupt if an image differs from the captured image.
    """

    def read_one(data: LogitDataset, index: int) -> PendingRows:
        entry, block = data.decoded(index)
        image_folder = Path(data.metadata["data"]).parent if folder is None else Path(folder)
        stored_images = read_stored_images(entry.images)
        where = f"sequence {index} of {data.path}"
        collapsed_ids = np.frombuffer(entry.token_ids, "<i4")
        try:
            ids, images = with_images(
                collapsed_ids, [image_folder / name for name, _ in stored_images], reader, where
            )
        except InvalidInput as error:
            error.field = "data.image_folder"
            raise
        digests = () if images is None else images.digests
        if digests != tuple(digest for _, digest in stored_images):
            raise Corrupt(
                f"the images of {where} are not those that were captured",
                field="data.image_folder",
                hint="give the folder of the captured images, or capture again",
            )
        start = entry.start + len(ids) - len(collapsed_ids)
        tokens = torch.from_numpy(ids.astype(np.int64))
        return PendingRows(TokenSequence(tokens, start, images=images), resolved(block))

    return read_one


def stored_prompt(data: LogitDataset, index: int) -> Prompt:
    """Return the prompt of stored sequence `index`: its first tokens, which have no rows."""
    entry = data.entry(index)
    return Prompt(np.frombuffer(entry.token_ids, "<i4")[: entry.start].astype(np.int32), "")
