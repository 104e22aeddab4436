"""The memory that answers may take in this process, shared by all streams."""

from __future__ import annotations

import asyncio

from protos.rpc.transport import MAX_REQUEST_BYTES

# A single stream gets half of these bytes.
MAX_ANSWER_BYTES = 512 << 20
# The limit of the bytes of all requests whose last message has not arrived: four of the longest.
MAX_UNFINISHED_BYTES = 4 * MAX_REQUEST_BYTES


class AnswerBudget:
    """Limit of the bytes of all answers in this process, computed or waiting for clients.

    A stream may use more bytes while its answers have fewer bytes than the free part (dynamic
    thresholds, Choudhury and Hahne 1998). One stream gets half of the budget, and each of n equal
    streams gets 1/(n + 1) of the budget, so a new stream always finds free bytes. A stream without
    answers can always hold one request. Therefore, the process holds at most `max_bytes` and one
    answer per stream, and `max_unfinished_bytes` of requests that have not arrived completely. Use
    this class from one event loop.
    """

    def __init__(
        self, max_bytes: int | None = None, max_unfinished_bytes: int = MAX_UNFINISHED_BYTES
    ) -> None:
        """Create a budget of `max_bytes`; None: MAX_ANSWER_BYTES."""
        self._max_bytes = MAX_ANSWER_BYTES if max_bytes is None else max_bytes
        self._max_unfinished_bytes = max_unfinished_bytes
        self._used = 0
        self._unfinished = 0
        self._release_events: set[asyncio.Event] = set()

    def share(self) -> BudgetShare:
        """Return a share for a new stream, with 0 bytes."""
        return BudgetShare(self)


class BudgetShare:
    """The bytes of one stream in the budget."""

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
        """Add `size` bytes of an unfinished request; False if all streams then have too many."""
        if self._budget._unfinished + size > self._budget._max_unfinished_bytes:
            return False
        self._unfinished += size
        self._budget._unfinished += size
        self.take(size)
        return True

    def give_back_unfinished(self) -> None:
        """Give back the bytes of the unfinished request: it is complete, or is dropped."""
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
