"""The steps of a job that learns from a store: its rows were captured, no teacher runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from clients.store.dataset import LogitDataset
from student_trainer.data.order import Order
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import TokenSequence
from student_trainer.methods.on_policy import Answers
from student_trainer.parallel.collectives import together
from student_trainer.teachers.source import PendingRows, resolved

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Mixture:
    """How many of a step's sequences, the first ones, the student answers itself."""

    answers: Answers
    count: int


@dataclass(frozen=True)
class _Share:
    """This process's part of a step, read."""

    stored: list[PendingRows]
    prompts: list[Prompt]
    numbers: list[int]


class StoredSteps:
    """`per_step` sequences a step, verified and decoded by a thread while earlier ones are learned.

    Two steps ahead and no more are in memory. Which ones a step has is a pure function of the seed.
    """

    def __init__(
        self,
        data: LogitDataset,
        chosen: NDArray[np.int64],
        accelerator: Accelerator,
        *,
        seed: int,
        per_step: int,
        last_step: int,
        mixture: Mixture | None = None,
    ) -> None:
        """`chosen`: the sequences of `data` to learn from; `last_step`: none is read after it."""
        self._data = data
        self._chosen = chosen
        self._accelerator = accelerator
        self._order = Order(len(chosen), seed)
        self._per_step = per_step
        self._last_step = last_step
        self._mixture = mixture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._reads: dict[int, Future[_Share]] = {}

    def of_step(self, step: int) -> list[PendingRows]:
        """Raises Corrupt, in every process, before anything of the step is learned."""
        for ahead in range(step, min(step + _STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reads:
                self._reads[ahead] = self._thread.submit(self._read, ahead)
        share = together(self._accelerator, self._reads.pop(step).result)
        if self._mixture is None:
            return share.stored
        return self._mixture.answers.gathered_to(share.prompts, share.numbers) + share.stored

    def _read(self, step: int) -> _Share:
        places = self._order.of_step(step, self._per_step)
        world = self._accelerator.num_processes
        mine = range(self._accelerator.process_index, len(places), world)
        written = self._mixture.count if self._mixture else 0
        own = [i for i in mine if i < written]
        return _Share(
            [read(self._data, int(self._chosen[places[i]])) for i in mine if i >= written],
            [prompt_of(self._data, int(self._chosen[places[i]])) for i in own],
            [(step - 1) * len(places) + i for i in own],
        )


def read(data: LogitDataset, index: int) -> PendingRows:
    """Sequence `index` with its rows. Raises Corrupt, naming it and what to do."""
    entry, block = data.decoded(index)
    ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int64)
    return PendingRows(TokenSequence(torch.from_numpy(ids), entry.start), resolved(block))


def prompt_of(data: LogitDataset, index: int) -> Prompt:
    """What stands before the scored tokens of sequence `index`."""
    entry = data.entry(index)
    return Prompt(np.frombuffer(entry.token_ids, "<i4")[: entry.start].astype(np.int32), "")
