"""The limit for the memory of answers in this process, which all streams share."""

from __future__ import annotations

import asyncio

from protos.rpc.transport import MAX_REQUEST_BYTES

# A single stream gets half of these bytes.
MAX_ANSWER_BYTES = 512 << 20
# The limit of the bytes of all requests whose last message has not arrived: four of the longest.
MAX_UNFINISHED_BYTES = 4 * MAX_REQUEST_BYTES


class AnswerBudget:
    """Limits the bytes of all answers in this process that are computed or wait for their client.

    A stream may read another request while its answers have fewer bytes than the free part of the
    budget (dynamic thresholds, Choudhury and Hahne 1998). So one busy stream gets half of the
    budget, and each of n busy streams gets 1/(n + 1) of it: a new stream always finds free bytes. A
    stream without answers may always read one request.

    `max_unfinished_bytes` limits the requests of which only a part has arrived. In total, the
    process holds at most `max_bytes`, plus one answer per stream, plus `max_unfinished_bytes`. Use
    this class from one event loop.
    """

    def __init__(
        self, max_bytes: int | None = None, max_unfinished_bytes: int = MAX_UNFINISHED_BYTES
    ) -> None:
        """Create a budget of `max_bytes` bytes; None means MAX_ANSWER_BYTES."""
        self._max_bytes = MAX_ANSWER_BYTES if max_bytes is None else max_bytes
        self._max_unfinished_bytes = max_unfinished_bytes
        self._used = 0
        self._unfinished = 0
        self._release_events: set[asyncio.Event] = set()

    def share(self) -> BudgetShare:
        """Return a share of the budget for a new stream; it has 0 bytes at first."""
        return BudgetShare(self)


class BudgetShare:
    """The part of the budget that one stream uses, in bytes."""

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self._release_event = asyncio.Event()
        self._closed = False
        self.bytes = 0
        self._unfinished = 0

    @property
    def has_room(self) -> bool:
        """True if the stream may read another request."""
        free = self._budget._max_bytes - self._budget._used
        return not self.bytes or self.bytes < free

    def take(self, size: int) -> None:
        """Add `size` bytes to the share."""
        self.bytes += size
        self._budget._used += size

    def take_unfinished(self, size: int) -> bool:
        """Add `size` bytes of an unfinished request to the share, and return True.

        Returns False and adds nothing if the unfinished requests of all streams would be too large.
        """
        if self._budget._unfinished + size > self._budget._max_unfinished_bytes:
            return False
        self._unfinished += size
        self._budget._unfinished += size
        self.take(size)
        return True

    def give_back_unfinished(self) -> None:
        """Give back the bytes of the unfinished request, which is complete now or was dropped."""
        size, self._unfinished = self._unfinished, 0
        self._budget._unfinished -= size
        self.give_back(size)

    def give_back(self, size: int) -> None:
        """Remove `size` bytes from the share, and wake the streams that wait for room."""
        if self._closed:
            return
        self.bytes -= size
        self._budget._used -= size
        self._release_event.set()
        for event in self._budget._release_events:
            event.set()

    def close(self) -> None:
        """Give back all bytes; further calls of `give_back` do nothing."""
        self.give_back_unfinished()
        self.give_back(self.bytes)
        self._closed = True

    async def wait_for_release(self) -> None:
        """Wait until this stream or another stream gives bytes back."""
        self._release_event.clear()
        self._budget._release_events.add(self._release_event)
        try:
            await self._release_event.wait()
        finally:
            self._budget._release_events.discard(self._release_event)
