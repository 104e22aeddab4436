"""The state of an order during sampling with vLLM: its ended sequences and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import Marks

_FETCH_BYTES = 1 << 23  # approximate bytes of records that one call to the worker returns


@dataclass(frozen=True)
class EndedSequence:
    """A sequence that has ended: its index in the order and the number of its tokens.

    ended: whether the last token is an end token. closed: whether it completes a mark.
    """

    index: int
    length: int
    ended: bool
    closed: bool


@dataclass(eq=False)
class RunningOrder:
    """An order during sampling. `name`: its name in vLLM's worker.

    fault: the error that makes its tokens invalid, or None. tasks: the tasks that follow the
    sequences, by index in the order.
    """

    name: str
    order: Order
    fault: Exception | None = None
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _queue: asyncio.Queue[EndedSequence | None] = field(default_factory=asyncio.Queue)

    def put(self, sequence: EndedSequence) -> None:
        """Add a sequence that has ended."""
        self._queue.put_nowait(sequence)

    def fail(self, fault: Exception) -> None:
        """Make `wait_for_ended` raise `fault`; the first fault is kept."""
        self.fault = self.fault or fault
        self._queue.put_nowait(None)

    async def cancel(self, indices: Iterable[int]) -> None:
        """Cancel the tasks of sequences, and wait until they have sent stop requests to vLLM."""
        tasks = [self.tasks[index] for index in indices]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_ended(self) -> list[EndedSequence]:
        """Wait for the end of a sequence, and return all sequences that have ended.

        Limits the size of their records to about _FETCH_BYTES. Raises the fault.
        """
        settings = self.order.settings
        per_token = 16 + 4 * settings.top_k + 8 * settings.draws
        ended_sequences: list[EndedSequence] = []
        size = 0
        while not ended_sequences or (size < _FETCH_BYTES and not self._queue.empty()):
            sequence = await self._queue.get()
            if self.fault is not None or sequence is None:
                assert self.fault is not None
                raise self.fault
            ended_sequences.append(sequence)
            size += per_token * sequence.length
        return ended_sequences


def closed_length(tokens: list[int], first_new: int, marks: Marks) -> int | None:
    """Return the length up to the first mark that a token from `first_new` on completes.

    None: no mark is complete.
    """
    ids = torch.tensor(tokens)
    for position in (first_new + marks.may_close(ids[first_new:]).nonzero().flatten()).tolist():
        if marks.closed_by(ids[: position + 1]):
            return int(position) + 1
    return None
