"""The state of an order while vLLM samples it: its ended sequences and its error."""

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
    """A sequence that has ended.

    - index: the index of the sequence in the order.
    - length: the number of its tokens.
    - ended: True if the last token is an end token.
    - closed: True if the last token completes a mark.
    """

    index: int
    length: int
    ended: bool
    closed: bool


@dataclass(eq=False)
class RunningOrder:
    """An order while it is sampled.

    - name: the name of the order in vLLM's worker.
    - fault: the error that makes the tokens of the order invalid, or None.
    - tasks: one asyncio task per sequence, by index in the order. The task waits for vLLM's output.
    """

    name: str
    order: Order
    fault: Exception | None = None
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _queue: asyncio.Queue[EndedSequence | None] = field(default_factory=asyncio.Queue)

    def put(self, sequence: EndedSequence) -> None:
        """Report that a sequence has ended."""
        self._queue.put_nowait(sequence)

    def fail(self, fault: Exception) -> None:
        """Make `wait_for_ended` raise `fault`. After a second call, the first fault is raised."""
        self.fault = self.fault or fault
        self._queue.put_nowait(None)

    async def cancel(self, indices: Iterable[int]) -> None:
        """Cancel the tasks of the sequences `indices`.

        Waits until the tasks have sent their stop requests to vLLM.
        """
        tasks = [self.tasks[index] for index in indices]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_ended(self) -> list[EndedSequence]:
        """Wait until a sequence ends, and return all sequences that have ended since the last call.

        If their records exceed about _FETCH_BYTES, the remaining sequences are returned by the next
        call. Raises the fault of the order.
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
    """Return the number of tokens up to the end of the first mark; None if no mark is complete.

    `first_new`: only marks that this token or a later token completes are considered.
    """
    ids = torch.tensor(tokens)
    for position in (first_new + marks.may_close(ids[first_new:]).nonzero().flatten()).tolist():
        if marks.closed_by(ids[: position + 1]):
            return int(position) + 1
    return None
