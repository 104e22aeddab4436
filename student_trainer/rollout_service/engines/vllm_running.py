"""An order while vLLM samples it: which of its sequences have ended, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import Marks

_FETCH_BYTES = 1 << 23  # of records that one call to the worker returns, about


@dataclass(frozen=True)
class Ended:
    """A sequence that has ended: its index in the order and the number of its tokens.

    ended: the last token is an end token. closed: it completes a mark.
    """

    index: int
    length: int
    ended: bool
    closed: bool


@dataclass(eq=False)
class RunningOrder:
    """An order that is being sampled; `name` is that of the order in vLLM's worker.

    fault: why its tokens must not be used; None: they may be. tasks: follows each sequence, by its
    index in the order.
    """

    name: str
    order: Order
    fault: Exception | None = None
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _queue: asyncio.Queue[Ended | None] = field(default_factory=asyncio.Queue)

    def put(self, ended: Ended) -> None:
        """Add a sequence that has ended."""
        self._queue.put_nowait(ended)

    def fail(self, fault: Exception) -> None:
        """Make `ended_ones` raise `fault`; the first fault is kept."""
        self.fault = self.fault or fault
        self._queue.put_nowait(None)

    async def cancel(self, indices: Iterable[int]) -> None:
        """Cancel the tasks of sequences, and wait until vLLM was told to end them."""
        tasks = [self.tasks[index] for index in indices]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ended_ones(self) -> list[Ended]:
        """Wait for the end of a sequence; return all that have ended meanwhile.

        At most as many as have about _FETCH_BYTES of records. Raises the fault.
        """
        settings = self.order.settings
        per_token = 16 + 4 * settings.top_k + 8 * settings.draws
        found: list[Ended] = []
        size = 0
        while not found or (size < _FETCH_BYTES and not self._queue.empty()):
            ended = await self._queue.get()
            if self.fault is not None or ended is None:
                assert self.fault is not None
                raise self.fault
            found.append(ended)
            size += per_token * ended.length
        return found


def closed_length(tokens: list[int], before: int, marks: Marks) -> int | None:
    """Return the length up to the first mark that is closed by a token from `before` on.

    None: no mark is closed.
    """
    ids = torch.tensor(tokens)
    for place in (before + marks.may_close(ids[before:]).nonzero().flatten()).tolist():
        if marks.closed_by(ids[: place + 1]):
            return int(place) + 1
    return None
